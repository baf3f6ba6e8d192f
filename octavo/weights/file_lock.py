"""A lock between processes on one machine: `hold_file_lock`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `path` (made when missing, and left there); on_wait is called once when another process has it.

    The system frees the lock when its holder ends, however it ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(descriptor):
            on_wait()
            _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _lock(descriptor: int) -> None:
        while not _try_lock(descriptor):
            time.sleep(0.2)  # Windows has no call that waits without a limit

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
