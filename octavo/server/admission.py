"""--max-num-queued-requests: a queue that is long enough is refused with 429, rather than answered far too late."""

from __future__ import annotations

from octavo.errors import OverloadedError
from octavo.server.api import ServingEngine


class Admission:
    """max_num_queued: sequences that may wait for their turn, so that n = 4 counts as four; None for any number."""

    def __init__(self, engine: ServingEngine, max_num_queued: int | None):
        self._engine = engine
        self._max_num_queued = max_num_queued

    def check(self, num_sequences: int) -> None:
        """Raises OverloadedError when so many more would make the queue too long."""
        if self._max_num_queued is None:
            return
        num_queued = self._engine.count_queued(num_sequences)
        if num_queued > self._max_num_queued:
            raise OverloadedError(
                f"The server is busy: with this request {num_queued} generations would wait for their turn, and at "
                f"most {self._max_num_queued} may (--max-num-queued-requests); try again a little later.",
                code="queue_full",
            )
