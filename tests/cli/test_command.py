"""The command as a process: what it prints last, its status, and that it looks at the port first."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent.parent


def run(*arguments: str, module: str = "octavo.cli.main", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OCTAVO_DEBUG": "", **environment},
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_the_version() -> None:
    for arguments in (["version"], ["--version"]):
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (0, f"octavo {octavo.__version__}\n")


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from octavo.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'numpy', 'tokenizers', 'uvicorn', 'jinja2', 'zmq', 'yaml', 'fastapi', 'msgspec'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.stdout.startswith("Usage: octavo serve")
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize("module", ["octavo.cli.main", "octavo.server"])
def test_a_port_in_use_is_told_before_the_model_is_looked_for(module: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = ["serve"] if module == "octavo.cli.main" else []
        result = run(*command, "--model", "/nothing/here.gguf", "--port", str(port), module=module)
    assert result.returncode == 2
    assert result.stderr.startswith(f"octavo: Port {port} on 127.0.0.1 is in use")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "hi", "--model"]])
def test_the_last_line_of_a_failed_start_is_the_cause(command: list[str]) -> None:
    result = run(*command, "/nothing/here.gguf")
    assert result.returncode == 1
    assert "/nothing/here.gguf" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_traceback_is_there_for_whoever_asks() -> None:
    result = run("serve", "--block-size", "7", OCTAVO_DEBUG="1")
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("octavo: --block-size is 7")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-num-seq", "5"], "--max-num-seqs"),
        (["serv"], "No such command 'serv'"),
        (["serve", "--port", "x"], "--port"),
        (["generate", ""], "prompt is empty"),
        (["generate"], "prompt is empty"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["serve", "--block-size", "7"], "--block-size is 7"),
    ],
)
def test_a_mistake_in_the_command_is_explained(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.returncode in (1, 2)
    assert words in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="closes streams with a shell")
@pytest.mark.parametrize(
    ("redirection", "status", "words"),
    [
        (">&-", 0, ""),
        ("2>&- <&-", 0, ""),
        pytest.param(
            ">/dev/full",
            1,
            "octavo: No space left on device",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device"),
        ),
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(redirection: str, status: int, words: str) -> None:
    script = f"exec {shlex.quote(sys.executable)} -m octavo.cli.main serve --help {redirection}"
    result = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == status, result.stderr
    assert result.stderr.strip() == words
