"""How long a request may take. `asyncio.timeout` of newer Pythons, with an end that is fixed before it is entered."""

from __future__ import annotations

import asyncio
from types import TracebackType

from octavo.errors import RequestTimeoutError


class Deadline:
    """`async with deadline:` raises RequestTimeoutError in its body once the time is over; may be entered again.

    timeout_s: from now on; None never ends
    """

    def __init__(self, timeout_s: float | None):
        self._timeout_s = timeout_s
        loop = asyncio.get_running_loop()
        self._ends_at = None if timeout_s is None else loop.time() + timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._has_expired = False

    async def __aenter__(self) -> Deadline:
        if self._ends_at is not None:
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_at(self._ends_at, self._expire)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._has_expired:
            return
        self._has_expired = False
        if exc_type is asyncio.CancelledError:
            uncancel = getattr(self._task, "uncancel", None)  # Python 3.11 counts the cancellations
            if uncancel is not None:
                uncancel()
            raise RequestTimeoutError(
                f"This request was not finished within {self._timeout_s:g} seconds (--request-timeout) and was "
                "aborted; ask for fewer tokens, or stream the answer and keep what has come.",
                code="request_timeout",
            ) from None

    def _expire(self) -> None:
        assert self._task is not None
        self._has_expired = True
        self._task.cancel()
