"""Memory and cores as a container's limits leave them, on made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.machine import Machine, detect_machine

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def detect(root: Path, cpus: range = range(4)) -> Machine:
    return detect_machine(root / "proc", root / "sys", frozenset(cpus))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """1,000 MiB, 600 of them free; 4 processors, two of each core."""
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {600 * 1024} kB\n",
            "proc/self/cgroup": "0::/\n",
        }
        | {f"sys/devices/system/cpu/cpu{cpu}/topology/core_id": f"{cpu // 2}\n" for cpu in range(4)}
        | {f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": "0\n" for cpu in range(4)},
    )
    return tmp_path


def test_a_plain_host(host: Path) -> None:
    assert detect(host) == Machine(total_bytes=1000 * MIB, available_bytes=600 * MIB, num_cores=2, num_cpus=4)


def test_only_the_cores_of_our_affinity_mask_count(host: Path) -> None:
    machine = detect(host, range(1, 2))
    assert (machine.num_cores, machine.num_cpus) == (1, 1)


@pytest.mark.parametrize("folder", ["sys/fs/cgroup", "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"])
def test_a_limit_of_our_group_or_of_any_above_counts(host: Path, folder: str) -> None:
    write(
        host,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            f"{folder}/memory.max": f"{300 * MIB}\n",
            f"{folder}/memory.current": f"{200 * MIB}\n",
            f"{folder}/memory.stat": f"anon 5\ninactive_file {50 * MIB}\n",
            f"{folder}/cpu.max": "150000 100000\n",
        },
    )
    assert detect(host) == Machine(total_bytes=300 * MIB, available_bytes=150 * MIB, num_cores=1, num_cpus=4)


def test_no_limits_are_no_limits(host: Path) -> None:
    write(host, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert detect(host).num_cores == 2
    assert detect(host).total_bytes == 1000 * MIB


def test_version_1_of_control_groups(host: Path) -> None:
    write(
        host,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{400 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{100 * MIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    machine = detect(host)
    assert (machine.total_bytes, machine.available_bytes, machine.num_cores) == (400 * MIB, 300 * MIB, 2)


def test_less_than_one_processor_is_one_core(host: Path) -> None:
    write(host, {"sys/fs/cgroup/cpu.max": "20000 100000\n"})
    assert detect(host).num_cores == 1


def test_a_system_that_tells_nothing_still_gives_a_machine(tmp_path: Path) -> None:
    machine = detect(tmp_path, range(3))
    assert machine.total_bytes >= machine.available_bytes > 0
    assert (machine.num_cores, machine.num_cpus) == (3, 3)


def test_this_machine() -> None:
    machine = detect_machine()
    assert machine.total_bytes >= machine.available_bytes > 0
    assert 1 <= machine.num_cores <= machine.num_cpus
