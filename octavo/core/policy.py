"""Who is first, and who is preempted. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

from octavo.core.sequence import Sequence, SequenceStatus
from octavo.errors import ConfigError


class Policy(Protocol):
    """The scheduler keeps both `waiting` and `running` sorted by `order_key`; no two sequences have the same key.

    A preempted sequence keeps its key, so it waits ahead of everyone who came later.
    """

    def order_key(self, sequence: Sequence) -> Any:
        """The smallest is first."""
        ...

    def find_victim(self, running: SequenceABC[Sequence], beneficiary: Sequence) -> Sequence | None:
        """Who of `running` (in order) makes room for the beneficiary; None: it has to wait.

        A running beneficiary always gets an answer, which may be itself.
        """
        ...


class FcfsPolicy:
    """First come, first served: who came last makes room, and only for those who are running already."""

    def order_key(self, sequence: Sequence) -> int:
        return sequence.seq_id

    def find_victim(self, running: SequenceABC[Sequence], beneficiary: Sequence) -> Sequence | None:
        return running[-1] if beneficiary.status is SequenceStatus.RUNNING else None


class PriorityPolicy:
    """Lower numbers first, then by arrival. The least urgent, newest makes room, also for a more urgent newcomer."""

    def order_key(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.request.priority, sequence.seq_id

    def find_victim(self, running: SequenceABC[Sequence], beneficiary: Sequence) -> Sequence | None:
        if not running:
            return None
        last = running[-1]
        if beneficiary.status is SequenceStatus.RUNNING:
            return last
        # Strictly less urgent: among equals a newcomer that could preempt would be preempted in turn, for ever.
        return last if last.request.priority > beneficiary.request.priority else None


_POLICIES: dict[str, type[FcfsPolicy] | type[PriorityPolicy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy}


def get_policy(name: str) -> Policy:
    if name not in _POLICIES:
        raise ConfigError(f"The scheduling policy is {name!r}, but it must be one of {sorted(_POLICIES)}.")
    return _POLICIES[name]()
