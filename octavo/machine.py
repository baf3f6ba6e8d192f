"""What this machine lets us use: memory and cores, with a container's limits taken for what they are.

Reads /proc, /sys and the affinity mask, once, at start-up. Standard library only; imports nothing of ours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Assumed where the system does not tell (neither /proc nor sysconf); --kv-cache-memory-bytes overrides what follows.
_UNKNOWN_MEMORY_BYTES = 4 * 2**30
# cgroup v1 writes "no limit" as the largest multiple of a page that fits in 63 bits.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """total_bytes:     RAM, or the container's limit where that is lower
    available_bytes: what could be had now without swapping, or what is left below the container's limit
    num_cores:       physical cores in our affinity mask, at most the container's processor quota; at least 1
    num_cpus:        logical processors in our affinity mask
    """

    total_bytes: int
    available_bytes: int
    num_cores: int
    num_cpus: int


def detect_machine(
    proc: Path = Path("/proc"), sys: Path = Path("/sys"), affinity: frozenset[int] | None = None
) -> Machine:
    """Measure this machine. The arguments let a test describe another one."""
    total, available = _system_memory(proc)
    cgroups = _cgroup_folders(proc, sys / "fs" / "cgroup")
    for limit, used in map(_cgroup_memory, cgroups):
        if limit < total:
            total = limit
        available = min(available, max(limit - used, 0))
    cpus = affinity if affinity is not None else _affinity()
    num_cores = _physical_cores(sys / "devices" / "system" / "cpu", cpus)
    for quota in map(_cgroup_cpus, cgroups):
        num_cores = int(max(min(num_cores, quota), 1))
    return Machine(
        total_bytes=total,
        available_bytes=min(available, total),
        num_cores=max(num_cores, 1),
        num_cpus=max(len(cpus), 1),
    )


def _system_memory(proc: Path) -> tuple[int, int]:
    fields = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            fields[name] = int(rest.split()[0]) * 1024
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", fields["MemTotal"]))
    try:  # macOS has no /proc
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = _UNKNOWN_MEMORY_BYTES
    return total, total


def _cgroup_folders(proc: Path, root: Path) -> list[Path]:
    """Our control groups and all above them: a limit may be set at any level. Version 2 and version 1."""
    folders = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / controllers if controllers else root
        inner = path.strip("/")
        # Inside a container the path may be the host's, which does not exist here; the root then is our own group.
        parts = [part for part in inner.split("/") if part and part != ".."]
        folders += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _cgroup_memory(folder: Path) -> tuple[int, int]:
    """(limit, used and not easily given back) in bytes; a very large limit where there is none."""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _read(folder / limit_file).strip()
        if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            used = _read(folder / used_file).strip()
            reclaimable = 0
            for line in _read(folder / "memory.stat").splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
                    reclaimable = max(reclaimable, int(value))
            return int(limit), max(int(used) - reclaimable, 0) if used.isdigit() else 0
    return 2**63, 0


def _cgroup_cpus(folder: Path) -> float:
    """The processor quota in whole processors; infinite where there is none."""
    words = _read(folder / "cpu.max").split()
    if len(words) != 2:
        words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    if words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return float("inf")


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _physical_cores(folder: Path, cpus: frozenset[int]) -> int:
    """Two hyper-threads of one core count once: they share the arithmetic units that a matmul keeps busy."""
    cores = set()
    for cpu in cpus:
        topology = folder / f"cpu{cpu}" / "topology"
        package, core = _read(topology / "physical_package_id").strip(), _read(topology / "core_id").strip()
        cores.add((package, core) if core else ("", f"cpu{cpu}"))
    return len(cores)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
