"""Pages for the terminal: help, start, progress."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import typer

from octavo.cli import progress as progress_module
from octavo.cli.cells import wrap_words
from octavo.cli.help_page import make_help_page, wants_help
from octavo.cli.main import app
from octavo.cli.progress import ProgressLine
from octavo.cli.start_page import print_start_page, round_to_sum
from octavo.report import LedgerRow, MemoryLedger, StartReport, TimelineEntry

COMMAND: Any = typer.main.get_command(app)
MIB = 2**20


def make_report(**changes: object) -> StartReport:
    ledger = MemoryLedger(
        budget_bytes=2000 * MIB,
        rows=(
            LedgerRow("weights", 515 * MIB + 1),
            LedgerRow("KV cache", 1000 * MIB - MIB // 2, "reserved; taken from the system as blocks are first used"),
            LedgerRow("workspace", 199 * MIB + MIB // 2, "estimate: activations, logits, interpreter"),
            LedgerRow("rest", 286 * MIB - 1, "left alone"),
        ),
        block_bytes=360 * 1024,
        num_blocks=2844,
        num_tokens=45504,
        max_full_length_sequences=5,
    )
    fields: dict[str, object] = {
        "model": "/a/rather/long/path/to/a/model/that/is/longer/than/a/line/SmolLM2-135M-Instruct.Q4_1.gguf",
        "served_model_names": ("smollm2", "another-name"),
        "architecture": "llama",
        "num_parameters": 134_515_008,
        "weights_dtype": "float32",
        "weights_bytes": 515 * MIB + 1,
        "ledger": ledger,
        "block_size": 16,
        "num_blocks": 2844,
        "kv_cache_dtype": "float16",
        "max_model_len": 8192,
        "max_model_len_reason": "model",
        "model_window": 8192,
        "max_full_length_sequences": 5,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "device": "cpu",
        "threads": 1,
        "isa": "avx2",
        "timeline": (TimelineEntry("load the weights", 1.03), TimelineEntry("run a first step", 0.11)),
        "notes": ("--enforce-eager has no effect on a CPU: no graphs are captured, every step runs eagerly.",),
    }
    return StartReport(**{**fields, **changes})  # type: ignore[arg-type]


def start_page(report: StartReport, width: int = 80, is_open: bool = False) -> str:
    stream = io.StringIO()
    print_start_page(report, url="http://127.0.0.1:8000", version="9.9.9", is_open=is_open, stream=stream, width=width)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_of_the_start_page_is_wider_than_the_terminal(width: int) -> None:
    lines = start_page(make_report(), width, is_open=True).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert not any(line.endswith(" ") or "…" in line for line in lines)


def test_the_start_page_says_what_one_wants_to_know() -> None:
    page = " ".join(start_page(make_report()).split())
    for words in (
        "Octavo 9.9.9",
        "(llama, 135 million parameters, weights float32)",
        "2,844 blocks of 16 tokens (360 KiB each), 45,504 tokens at once: 5 sequences of the full 8,192 tokens",
        "up to 64 sequences and 512 tokens a step",
        "cpu, 1 thread, avx2",
        "1.14 s: load the weights 1.03, run a first step 0.11",
        "note --enforce-eager has no effect",
        "Ready at http://127.0.0.1:8000/v1 for smollm2, another-name",
    ):
        assert words in page


def test_the_ledger_on_the_page_adds_up() -> None:
    sizes = [
        int(line.split(" MiB")[0].split()[-1].replace(",", ""))
        for line in start_page(make_report()).splitlines()
        if " MiB" in line and "blocks" not in line
    ]
    assert len(sizes) == 5
    assert sum(sizes[:-1]) == sizes[-1] == 2000


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([MIB // 2, MIB // 2], [1, 0]), ([3 * MIB, 0], [3, 0]), ([MIB // 4] * 8, [1, 1, 0, 0, 0, 0, 0, 0])],
)
def test_rounded_sizes_add_up_to_the_rounded_sum(sizes: list[int], expected: list[int]) -> None:
    assert round_to_sum(sizes, sum(sizes)) == expected


def test_a_window_cut_by_memory_is_told() -> None:
    page = start_page(make_report(max_model_len=4096, max_model_len_reason="memory"))
    assert "fitted to memory; the model's window is 8,192" in " ".join(page.split())


def test_an_open_server_without_a_key_is_warned_of_loudly() -> None:
    assert "WARNING" in start_page(make_report(), is_open=True)
    assert "--api-key" in start_page(make_report(), is_open=True)
    assert "WARNING" not in start_page(make_report())


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_help_shows_every_option_in_full(width: int) -> None:
    page = make_help_page(COMMAND.commands["serve"], "octavo serve", is_terminal=False, width=width)
    assert max(map(len, page.splitlines())) <= width
    assert page.startswith("Usage: octavo serve [MODEL] [OPTIONS]\n")
    headings = [line.split()[1] for line in page.splitlines() if line.startswith("──")]
    assert headings == ["Arguments", "Model", "Memory", "Scheduling", "Server", "Chat", "Access", "Machine"]
    for parameter in COMMAND.commands["serve"].params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("--"):
                assert f" {flag}" in page
        assert parameter.help


def every_command() -> list[tuple[str, Any]]:
    bench = COMMAND.commands["bench"].commands
    named = {**COMMAND.commands, **{f"bench {name}": command for name, command in bench.items()}}
    return [(name, command) for name, command in named.items() if name != "bench"]


@pytest.mark.parametrize(
    ("name", "command"), every_command(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_help_shows_the_default_of_every_option(name: str, command: Any) -> None:
    page = make_help_page(command, f"octavo {name}", is_terminal=False, width=200)
    entries = re.split(r"\n  (?=-)", page)[1:]
    assert len(entries) == sum(option.param_type_name == "option" for option in command.params)
    for entry in entries:
        text = " ".join(entry.split("\n──")[0].split())
        assert text.count("[default: ") == 1, text


def test_a_flag_shows_its_default_as_on_or_off() -> None:
    page = make_help_page(COMMAND.commands["bench"].commands["kernels"], "x", is_terminal=False, width=200)
    assert re.search(r"--numpy / --no-numpy .*\[default: on\]", page)
    page = make_help_page(COMMAND.commands["generate"], "x", is_terminal=False, width=200)
    assert re.search(r"--ignore-eos .*\[default: off\]", page)


@pytest.mark.parametrize("width", [30, 40, 59])
@pytest.mark.parametrize(
    ("name", "command"), every_command(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_help_fits_a_narrow_terminal(name: str, command: Any, width: int) -> None:
    page = make_help_page(command, f"octavo {name}", is_terminal=False, width=width)
    assert max(map(len, page.splitlines())) <= width


def test_help_lists_the_commands() -> None:
    page = make_help_page(COMMAND, "octavo", is_terminal=False, width=80)
    for name in ("serve", "generate", "chat", "version"):
        assert f"\n  {name} " in page


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["serve", "--help"], True), (["-h"], True), (["generate", "--", "--help"], False), (["serve"], False)],
)
def test_help_is_asked_for(arguments: list[str], expected: bool) -> None:
    assert wants_help(arguments) is expected


# --- progress -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_a_short_wait_is_silent(clock: list[float]) -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    clock[0] += 0.9
    line.show("load", 1, 2)
    line.clear()
    assert stream.getvalue() == ""


def test_a_terminal_gets_one_line_that_is_painted_over_and_cleared(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    line = ProgressLine(stream)
    clock[0] += 2
    line.show("load the weights", 300 * MIB, 600 * MIB)
    line.show("load the weights", 301 * MIB, 600 * MIB)  # too soon to paint again
    clock[0] += 2
    line.show("reserve")
    line.clear()
    first, second, blank, end = stream.getvalue()[1:].split("\r")
    assert first == "load the weights ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌  50%, 300 MiB of 600 MiB"
    assert second == "reserve ...".ljust(len(first))
    assert blank.strip() == end == ""


def test_a_narrow_terminal_gets_no_line_that_wraps(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    line = ProgressLine(stream)
    clock[0] += 2
    line.show("load the weights", 300 * MIB, 600 * MIB)
    line.clear()
    painted, blank, end = stream.getvalue()[1:].split("\r")
    assert len(painted) == len(blank) == 39
    assert end == ""


def test_wide_characters_are_counted_in_cells(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    line = ProgressLine(stream)
    clock[0] += 2
    line.show("日本語のモデル")
    line.clear()
    painted, blank, _ = stream.getvalue()[1:].split("\r")
    assert painted == "日本語のモ"
    assert len(blank) == 10


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a model: /reset forgets", 12, ["a model:", "/reset", "forgets"]),
        ("日本 語のモデル x", 6, ["日本", "語のモ", "デル x"]),
        ("Qwen2.5-Instruct", 6, ["Qwen2.", "5-Inst", "ruct"]),
        ("e\u0301e\u0301 e\u0301", 4, ["e\u0301e\u0301 e\u0301"]),
        ("日", 1, ["日"]),
        ("", 9, []),
    ],
)
def test_words_are_wrapped_in_cells(text: str, width: int, lines: list[str]) -> None:
    assert wrap_words(text, width) == lines


def test_a_log_gets_one_line_a_stage(clock: list[float]) -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    clock[0] += 2
    for num_done in range(5):
        line.show("load the weights", num_done, 5)
    line.show("reserve")
    line.clear()
    assert stream.getvalue() == "load the weights ...\nreserve ...\n"
