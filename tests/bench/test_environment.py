"""Who used the processors, told from made-up /proc folders."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from octavo.bench.environment import ForeignMeter, describe_environment, find_listeners, noise_notes


def write_stat(proc: Path, busy: int, idle: int) -> None:
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")


def write_process(proc: Path, pid: int, parent: int, ticks: int, name: str = "a (b) c") -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", "20"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_what_others_took_is_what_is_left_of_all_that_was_used(tmp_path: Path) -> None:
    me = os.getpid()
    write_stat(tmp_path, busy=1000, idle=1000)
    write_process(tmp_path, me, 1, 100)
    write_process(tmp_path, me + 1, me, 50)  # our child
    write_process(tmp_path, 7, 1, 500)  # the server that we measure, and its child
    write_process(tmp_path, 8, 7, 10)
    write_process(tmp_path, 9, 1, 10)  # a stranger
    meter = ForeignMeter([7], proc=tmp_path)
    write_stat(tmp_path, busy=1600, idle=1400)
    write_process(tmp_path, me, 1, 200)
    write_process(tmp_path, me + 1, me, 150)
    write_process(tmp_path, 7, 1, 600)
    write_process(tmp_path, 8, 7, 110)
    write_process(tmp_path, 9, 1, 210)
    # 600 of 1000 ticks were used, 400 of them by ours.
    assert meter.share() == pytest.approx(0.2)


def test_a_process_that_came_meanwhile_is_counted_from_nothing(tmp_path: Path) -> None:
    write_stat(tmp_path, 0, 0)
    write_process(tmp_path, os.getpid(), 1, 0)
    meter = ForeignMeter(proc=tmp_path)
    write_stat(tmp_path, 100, 0)
    write_process(tmp_path, 99_999_999, os.getpid(), 100)
    assert meter.share() == 0.0


def test_where_the_system_does_not_tell_the_share_is_unknown(tmp_path: Path) -> None:
    assert ForeignMeter(proc=tmp_path / "nothing").share() is None
    assert noise_notes(None) == ()


def test_noise_is_told_when_it_matters() -> None:
    assert noise_notes(0.01) == ()
    assert "25%" in noise_notes(0.25)[0]


@pytest.mark.skipif(not os.path.isdir("/proc/net"), reason="needs /proc")
def test_the_process_that_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert os.getpid() in find_listeners(port)
    assert os.getpid() not in find_listeners(port)


def test_the_environment_says_what_it_ran_on() -> None:
    environment = describe_environment(isa="avx2", threads=2, foreign_share=0.5, started_at=0.0)
    assert environment.cores >= 1
    assert environment.machine
    assert (environment.isa, environment.threads, environment.foreign_share) == ("avx2", 2, 0.5)
    assert environment.started_at == "1970-01-01T00:00:00Z"
