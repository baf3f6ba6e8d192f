"""`octavo bench` as a process: its pages, its mistakes, and a whole run against a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.fake_server import Connection, fake_server
from tests.cli.test_command import run


def test_bench_alone_lists_its_commands() -> None:
    result = run("bench")
    assert result.returncode == 2
    assert all(f"  {name}  " in result.stdout for name in ("serve", "throughput", "step", "kernels"))


def test_each_command_has_a_page() -> None:
    result = run("bench", "serve", "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: octavo bench serve [OPTIONS]")
    assert "--concurrency" in result.stdout


def test_a_run_against_a_server(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with fake_server() as server:
        result = run(
            *("bench", "serve", "--url", server.url, "--concurrency", "1,2", "--num_requests", "4"),
            *("--max-tokens", "3", "--json", str(path)),
        )
    assert result.returncode == 0, result.stderr
    assert "2 users" in result.stdout
    assert "exact" in result.stdout
    body = json.loads(path.read_text(encoding="utf-8"))
    assert [row["metrics"]["output_tokens"] for row in body["rows"]] == [12, 12]


def test_failed_requests_end_with_a_status() -> None:
    def refuse(connection: Connection, body: object) -> None:
        connection.send_json(429, {"error": {"message": "slow down"}})

    with fake_server(refuse) as server:
        result = run("bench", "serve", "--url", server.url, "--concurrency", "1", "--num-requests", "2")
    assert result.returncode == 1
    assert "failed 2 x: HTTP 429: slow down" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--url", "http://127.0.0.1:1"], "No model list at 127.0.0.1:1/v1/models"),
        (["serve", "--api", "soap"], "--api is 'soap'"),
        (["serve", "--scenario", "chaos"], "--scenario is 'chaos'"),
        (["serve", "--json", "/no/such/folder/x.json"], "folder does not exist"),
        (["throughput", "--plot", "x.pdf"], "must end in .png or .svg"),
        (["throughput", "--max-tokens", "1"], "--max-tokens is 1"),
        (["step", "--batch-sizes", "1,x"], "--batch-sizes is '1,x'"),
        (["kernels", "/nothing/here.gguf"], "/nothing/here.gguf"),
        (["throughput", "--model", "/nothing/here.gguf"], "/nothing/here.gguf"),
        (["step", "A", "-m", "B"], "The model is 'A' and --model is 'B'"),
        (["gallop"], "No such command 'gallop'"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str) -> None:
    result = run("bench", *arguments)
    assert result.returncode in (1, 2)
    assert words in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
