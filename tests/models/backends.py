"""The backends that a model must run on: `reference`, and `cpu` where the extension is built."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.ops.interface import Ops
from octavo.ops.reference import ReferenceOps

try:
    from octavo.ops.cpu import CpuOps
except ImportError as error:
    CPU_PROBLEM: str | None = f"the C++ extension is not built: {error}"
else:
    CPU_PROBLEM = None

BACKENDS: list[Any] = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(CPU_PROBLEM is not None, reason=CPU_PROBLEM or "")),
]


def make_ops(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else CpuOps(num_threads=2)
