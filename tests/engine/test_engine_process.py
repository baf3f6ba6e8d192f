"""The engine process's life and death beside its parent's, and what importing the package costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

TIMEOUT_S = 60.0

PARENT = """
import asyncio, os, signal, sys
from octavo import AsyncEngine, EngineArgs, SamplingParams
from tests.engine import fake_model

async def main():
    engine = await AsyncEngine.start(
        EngineArgs(model="fake"),
        source=fake_model.source("slow"),
        tokenizer=fake_model.make_tokenizer(),
        executor_name=fake_model.EXECUTOR_NAME,
    )
    if sys.argv[1] == "busy":
        stream = engine.generate(b"a", SamplingParams(max_tokens=None, ignore_eos=True))
        await stream.__anext__()
    print(engine.engine_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("load", ["idle", "busy"])
def test_the_engine_process_does_not_outlive_a_killed_parent(load: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, load],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    # Both processes hold the standard error that we read: it ends when the last of them has ended.
    output, errors = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode == -signal.SIGKILL, errors
    assert int(output) > 0
    assert errors == ""
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_the_engine_process_at_once_also_while_it_waits_for_its_orders() -> None:
    command = [sys.executable, "-m", "octavo.engine.process", "--address", "tcp://127.0.0.1:9"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    child.terminate()
    assert child.wait(TIMEOUT_S) == -signal.SIGTERM
    assert child.stdin is not None
    child.stdin.close()


def test_an_unknown_executor_is_told_by_name() -> None:
    from octavo.engine.loaded import find_executor_factory

    with pytest.raises(octavo.ConfigError, match=r"no_such_module:load"):
        find_executor_factory("no_such_module:load")
    with pytest.raises(octavo.ConfigError, match=r"has no attribute 'nothing'"):
        find_executor_factory("tests.engine.fake_model:nothing")


def test_importing_octavo_loads_nothing_heavy() -> None:
    script = (
        "import sys, octavo; octavo.SamplingParams(); octavo.OctavoError; "
        "print([name for name in ('numpy', 'zmq', 'tokenizers', 'asyncio', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        octavo.nothing  # noqa: B018
