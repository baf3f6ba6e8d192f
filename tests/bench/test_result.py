from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from octavo.bench.plot import PLOTS, check_plot_path, pick_series, points_of, save_plot
from octavo.bench.result import from_json, to_json, write_json
from octavo.bench.table import TABLES, draw_bar, format_number, print_result
from octavo.errors import ConfigError
from tests.bench.results import RESULTS, make_result, serve_row


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_json_gives_back_what_was_written(kind: str, tmp_path: Path) -> None:
    result = make_result(kind)
    write_json(result, tmp_path / "result.json")
    assert from_json((tmp_path / "result.json").read_text(encoding="utf-8")) == result


def test_numbers_that_json_lacks_become_unknown() -> None:
    row = dataclasses.replace(serve_row(), metrics={"a": float("nan"), "b": float("inf"), "c": 1.0})
    text = to_json(dataclasses.replace(make_result("serve"), rows=(row,)))
    assert from_json(text).rows[0].metrics == {"a": None, "b": None, "c": 1.0}


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 99}', '{"format_version": 1}'])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="The result"):
        from_json(text)


def test_a_field_too_many_is_named() -> None:
    body = json.loads(to_json(make_result("step")))
    body["rows"][0]["colour"] = "red"
    with pytest.raises(ConfigError, match="colour"):
        from_json(json.dumps(body))


def test_failures_are_counted_over_all_rows() -> None:
    assert make_result("serve").num_failures == 3
    assert make_result("step").num_failures == 0


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_tables_fit_into_eighty_columns_uncut(kind: str) -> None:
    stream = io.StringIO()
    print_result(make_result(kind), stream, width=80)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in stream.getvalue()
    for spec in TABLES[kind]:
        shown = any(line.startswith(spec.title) for line in lines)
        assert shown == any(row.get(spec.columns[0].metrics[0]) is not None for row in RESULTS[kind])


def test_failures_are_named_below_the_table() -> None:
    stream = io.StringIO()
    print_result(make_result("serve"), stream, width=80)
    assert "failed 2 x: HTTP 503: The engine is starting" in stream.getvalue()
    assert "3 failed" in stream.getvalue()


def test_bars_are_as_long_as_their_share() -> None:
    assert [draw_bar(share, 4) for share in (0.0, 0.5, 0.53125, 1.0, 7.0, -1.0)] == [
        "",
        "██",
        "██▏",
        "████",
        "████",
        "",
    ]


def test_numbers_have_three_digits_or_so() -> None:
    values = [None, 0.0, 0.12345, 1.2345, 12.345, 123.45, 12_345.6, 64.0]
    assert [format_number(value) for value in values] == ["-", "0", "0.123", "1.23", "12.3", "123", "12,346", "64"]


def test_a_plot_s_file_is_checked_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        check_plot_path(tmp_path / "plot.pdf")


def test_without_matplotlib_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[bench\]'"):
        check_plot_path(tmp_path / "plot.svg")


@pytest.mark.parametrize("kind", sorted(RESULTS))
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_written(kind: str, suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the optional extra `bench`")
    path = tmp_path / f"plot{suffix}"
    save_plot(make_result(kind), path)
    assert path.read_bytes()[:5] == {".png": b"\x89PNG\r", ".svg": b"<?xml"}[suffix]


def test_a_plot_shows_the_largest_series_and_leaves_gaps_out() -> None:
    rows = [serve_row(series=f"s{number}", rate=number) for number in range(20)]
    assert pick_series(rows, "output_tokens_per_s") == [f"s{number}" for number in range(10, 20)]
    panel = PLOTS["serve"].panels[0]
    points = [
        serve_row(x=4, rate=2.0),
        serve_row(x=1, rate=1.0),
        dataclasses.replace(serve_row(x=16), metrics={"output_tokens_per_s": None}),
    ]
    assert points_of(points, points[0].series, panel) == [(1, 1.0), (4, 2.0)]
