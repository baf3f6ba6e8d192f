"""Runs work on a stack that is large enough: the library descends schemas on the C stack, and overflowing it ends the
process without an exception.

The deepest schema that `schema` lets through needs less than 2 MB; threads get 0.5 MB on macOS and 0.1 MB on musl.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_STACK_BYTES = 16 * 1024 * 1024  # address space; only what is used becomes memory
_Result = TypeVar("_Result")
_lock = threading.Lock()


def run_on_large_stack(work: Callable[[], _Result]) -> _Result:
    """work's result, or what it raises. Takes a new thread, some 0.1 ms."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="octavo-compile-grammar", daemon=True)
    # The size is the process's; a thread that starts meanwhile elsewhere gets a larger stack than it needs.
    with _lock:
        previous = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(previous)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
