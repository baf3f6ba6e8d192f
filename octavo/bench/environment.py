"""The machine of a measurement, and who else used it meanwhile. Reads /proc where there is one."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import octavo
from octavo.bench.result import Environment
from octavo.machine import detect_machine

# Above this share of the machine taken by others, a run's numbers are marked.
NOISY_SHARE = 0.08


class ForeignMeter:
    """The share of all processors' time that processes other than ours took since `start`.

    own_pids: processes whose time is ours, with all their descendants; this process is always one of them
    """

    def __init__(self, own_pids: Iterable[int] = (), proc: Path = Path("/proc")):
        self._proc = proc
        self._roots = {os.getpid(), *own_pids}
        self.start()

    def start(self) -> None:
        self._began = self._read()

    def share(self) -> float | None:
        """None where the system does not tell; never below 0."""
        if self._began is None or (now := self._read()) is None:
            return None
        began = self._began
        total = now.total - began.total
        # A process that came or went in between counts with what it had when last seen.
        own = sum(max(ticks - began.own.get(pid, 0), 0) for pid, ticks in now.own.items())
        return max(now.busy - began.busy - own, 0) / total if total > 0 else None

    def _read(self) -> _Ticks | None:
        times = _read_stat(self._proc)
        if times is None:
            return None
        return _Ticks(
            *times, {pid: _process_ticks(self._proc, pid) for pid in _with_descendants(self._proc, self._roots)}
        )


class _Ticks:
    """busy and total of all processors; own: by pid, with children that have ended. All in clock ticks."""

    def __init__(self, busy: int, total: int, own: dict[int, int]):
        self.busy, self.total, self.own = busy, total, own


def describe_environment(
    *, isa: str = "", threads: int = 0, foreign_share: float | None = None, started_at: float | None = None
) -> Environment:
    machine = detect_machine()
    return Environment(
        machine=_processor_name(),
        cores=machine.num_cores,
        cpus=machine.num_cpus,
        memory_bytes=machine.total_bytes,
        isa=isa,
        threads=threads,
        python=platform.python_version(),
        version=octavo.__version__,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at)),
        foreign_share=foreign_share,
    )


def noise_notes(foreign_share: float | None) -> tuple[str, ...]:
    if foreign_share is None or foreign_share < NOISY_SHARE:
        return ()
    return (
        f"Other processes took {foreign_share:.0%} of the processors meanwhile: the times are too long by an unknown "
        "amount; measure again on a quiet machine.",
    )


def find_listeners(port: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes that hold a listening TCP socket at this port of this machine; [] where that cannot be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in _read_text(proc / "net" / table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    pids = []
    for folder in proc.glob("[0-9]*/fd"):
        try:
            if any(os.readlink(link) in inodes for link in folder.iterdir()):
                pids.append(int(folder.parent.name))
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return sorted(pids)


def _processor_name() -> str:
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read_stat(proc: Path) -> tuple[int, int] | None:
    """(busy, all) ticks of all processors together. Time stolen by the host is somebody else's, and counts as busy."""
    first = _read_text(proc / "stat").partition("\n")[0].split()
    if len(first) < 9 or first[0] != "cpu":
        return None
    user, nice, system, idle, waiting, irq, soft_irq, stolen = map(int, first[1:9])
    busy = user + nice + system + irq + soft_irq + stolen
    return busy, busy + idle + waiting


def _process_ticks(proc: Path, pid: int) -> int:
    fields = _stat_fields(proc, pid)
    return sum(int(field) for field in fields[11:15]) if fields else 0


def _with_descendants(proc: Path, roots: set[int]) -> set[int]:
    parent_of = {}
    for folder in proc.glob("[0-9]*"):
        if fields := _stat_fields(proc, int(folder.name)):
            parent_of[int(folder.name)] = int(fields[1])
    found = set(roots)
    while more := {pid for pid, parent in parent_of.items() if parent in found} - found:
        found |= more
    return found


def _stat_fields(proc: Path, pid: int) -> list[str]:
    """The fields after the command's name (which may hold spaces): state, parent, ...; [] when it has ended."""
    return _read_text(proc / str(pid) / "stat").rpartition(")")[2].split()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
