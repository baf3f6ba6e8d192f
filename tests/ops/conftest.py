"""The CPU backend in every variant this machine can run, beside the reference."""

from __future__ import annotations

import pytest

from octavo.ops.cpu import CpuOps, runnable_isas
from octavo.ops.reference import ReferenceOps

_INSTANCES: dict[tuple[str, int], CpuOps] = {}


def get_cpu(isa: str, num_threads: int = 2) -> CpuOps:
    key = (isa, num_threads)
    if key not in _INSTANCES:
        _INSTANCES[key] = CpuOps(isa=isa, num_threads=num_threads)
    return _INSTANCES[key]


@pytest.fixture(params=runnable_isas())
def cpu(request) -> CpuOps:
    return get_cpu(request.param)


@pytest.fixture(params=runnable_isas())
def cpu_threads(request) -> list[CpuOps]:
    """The same kernels with 1, 2 and 3 threads."""
    return [get_cpu(request.param, num_threads) for num_threads in (1, 2, 3)]


@pytest.fixture(scope="session")
def reference() -> ReferenceOps:
    return ReferenceOps()
