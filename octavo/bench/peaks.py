"""The machine's limits, measured in the same run as what is held against them; and the BLAS that NumPy runs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo import _cpu
from octavo.errors import ConfigError

# More than the caches hold on all but the largest machines.
_MEMORY_BYTES = 512 * 2**20
_TIME_S = 0.3
_ROUNDS = 100_000
_BLAS_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The best of many tries. Integer and float: multiplications and additions of the instruction set in use.

    read_bytes_per_s:   over as many bytes as the model's weights have, again and again, as its steps do: large caches
                        help, and the kernels have that help too
    memory_bytes_per_s: over more than caches hold
    """

    read_bytes_per_s: float
    memory_bytes_per_s: float
    integer_per_s: float
    float_per_s: float

    def describe(self) -> str:
        return (
            f"Measured limits: {self.read_bytes_per_s / 1e9:.1f} GB/s read over the weights' size "
            f"({self.memory_bytes_per_s / 1e9:.1f} over 512 MiB), {self.integer_per_s / 1e9:.0f} GOP/s with 8-bit "
            f"integers, {self.float_per_s / 1e9:.0f} GFLOP/s."
        )


def measure_peaks(isa: str, threads: int, weights_bytes: int) -> Peaks:
    """Raises ConfigError when the kernels were built before they could measure."""
    if not hasattr(_cpu, "MachinePeak"):
        raise ConfigError("The CPU kernels are older than this code; build them again: pip install .")
    peak = _cpu.MachinePeak(isa, threads)
    # Written once, so that the memory has pages of its own.
    memory = np.ones(_MEMORY_BYTES // 8)
    weights = memory[: max(min(weights_bytes, _MEMORY_BYTES) // 8, 1)]
    return Peaks(
        read_bytes_per_s=_best(lambda: peak.read(weights)),
        memory_bytes_per_s=_best(lambda: peak.read(memory)),
        integer_per_s=_best(lambda: peak.integer_operations(_ROUNDS)),
        float_per_s=_best(lambda: peak.float_operations(_ROUNDS)),
    )


def describe_blas(environment: Mapping[str, str]) -> str:
    """Which matrix product NumPy runs, as far as can be told."""
    version = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    name = f"{version.get('name', 'an unknown BLAS')} {version.get('version', '')}".strip()
    kernel, threads = _ask_openblas()
    tuned = [variable for variable in _BLAS_VARIABLES if variable in environment]
    said = f" (with {', '.join(tuned)} set)" if tuned else ""
    return f"NumPy {np.__version__}, {name}" + (f", its {kernel} kernel, {threads} threads" if kernel else "") + said


def _ask_openblas() -> tuple[str, int]:
    """The kernel that OpenBLAS chose and its threads; ("", 0) where it is another library."""
    package = Path(np.__file__).parent
    for path in sorted(package.parent.glob("numpy.libs/*openblas*")) + sorted(package.glob(".dylibs/*openblas*")):
        library = ctypes.CDLL(str(path))
        for prefix, suffix in (
            ("scipy_openblas", "64_"),
            ("scipy_openblas", ""),
            ("openblas", "64_"),
            ("openblas", ""),
        ):
            ask = getattr(library, f"{prefix}_get_corename{suffix}", None)
            count = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
            if ask is not None and count is not None:
                ask.restype = ctypes.c_char_p
                return ask().decode(), count()
    return "", 0


def _best(work: Callable[[], int]) -> float:
    """Work a second: the best of many short tries, as a neighbour may have been in the way of most."""
    work()
    best = 0.0
    began = time.perf_counter()
    while (start := time.perf_counter()) - began < _TIME_S:
        done = work()
        best = max(best, done / (time.perf_counter() - start))
    return best
