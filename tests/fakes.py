"""Fakes that behave like the real thing, only small and predictable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.interfaces import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, TokenLogprobs
from octavo.errors import RequestFailedError

# A slot holds what stands for the keys and values of one token: a number made from the token, its position and the
# numbers of all it attends to. So whoever reads a wrong slot, or a slot written by somebody else, gets another number.
Slot = tuple[int, int]  # (block id, offset)


class BrokenPlan(BaseException):
    """The core asks for something wrong. Not an Exception: the core must not take it for a failure of the device."""


def require(condition: bool, complaint: object) -> None:
    if not condition:
        raise BrokenPlan(complaint)


class SimulatedKV:
    """KV memory of all groups, by slot."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[Slot, int] = {}

    def slot(self, table: list[int], position: int) -> Slot:
        require(position // self.block_size < len(table), f"position {position} is beyond the table {table}")
        block_id = table[position // self.block_size]
        require(block_id >= 0, f"position {position} is in a block that was let go")
        return block_id, position % self.block_size

    def copy_block(self, source: int, destination: int) -> None:
        for offset in range(self.block_size):
            if (source, offset) in self.slots:
                self.slots[destination, offset] = self.slots[source, offset]
            else:
                self.slots.pop((destination, offset), None)


class FakeExecutor:
    """Samples a token that depends on every token so far, read back through the block tables, and on the seed.

    kv_group_windows: as in CoreConfig; a group with a window sees that many positions
    choose:           picks the token instead, when it returns one: `choose(scheduled) -> int | None`
    fail_next:        raise at the next execute, after the copies and half of the writes were made
    fail_next_at_once: raise at the next execute, before anything was done
    failing_seq_ids:  these make every step fail that they are part of
    nan_seq_ids:      these are reported in `failures`, the way a row of NaN is
    num_steps, finished_seq_ids: what has been seen so far
    """

    def __init__(
        self,
        block_size: int,
        kv_group_windows: tuple[int | None, ...] = (None,),
        *,
        vocab_size: int = 64,
        choose: Callable[[ScheduledSequence], int | None] | None = None,
    ) -> None:
        self.kv = SimulatedKV(block_size)
        self.windows = kv_group_windows
        self.vocab_size = vocab_size
        self.choose = choose
        self.fail_next = False
        self.fail_next_at_once = False
        self.failing_seq_ids: set[int] = set()
        self.nan_seq_ids: set[int] = set()
        self.num_steps = 0
        self.finished_seq_ids: list[int] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        require(bool(plan.scheduled), "an empty step is not executed")
        self.num_steps += 1
        self.finished_seq_ids += plan.finished_seq_ids
        if self.fail_next_at_once:
            self.fail_next_at_once = False
            raise RuntimeError("the device hiccuped")
        for source, destination in plan.block_copies:
            self.kv.copy_block(source, destination)
        output = ModelRunnerOutput()
        written: set[Slot] = set()
        for number, scheduled in enumerate(plan.scheduled):
            if self.fail_next and number >= len(plan.scheduled) // 2:
                self.fail_next = False
                raise RuntimeError("the device hiccuped")
            token_id = self._run(scheduled, written)
            if scheduled.seq_id in self.failing_seq_ids:
                raise RuntimeError(f"sequence {scheduled.seq_id} is poison")
            if scheduled.seq_id in self.nan_seq_ids:
                output.failures[scheduled.seq_id] = "The logits are not numbers."
                continue
            if scheduled.scored_positions:
                output.prompt_logprobs[scheduled.seq_id] = [
                    TokenLogprobs(scheduled.token_ids[position + 1], -float(position + 1))
                    for position in scheduled.scored_positions
                ]
            if scheduled.is_sampling:
                output.token_ids[scheduled.seq_id] = token_id
                if scheduled.sampling_params.logprobs is not None:
                    output.logprobs[scheduled.seq_id] = TokenLogprobs(token_id, -0.5)
        return output

    def _run(self, scheduled: ScheduledSequence, written: set[Slot]) -> int:
        start = scheduled.num_computed_tokens
        end = start + scheduled.num_scheduled_tokens
        require(0 <= start < end <= len(scheduled.token_ids), scheduled)
        require(scheduled.is_sampling == (end == len(scheduled.token_ids)), scheduled)
        state = 0
        for position in range(start, end):
            state = 0
            for table, window in zip(scheduled.block_tables, self.windows, strict=True):
                first = 0 if window is None else max(0, position - window + 1)
                context = tuple(self.kv.slots.get(self.kv.slot(table, i), -1) for i in range(first, position))
                value = hash((scheduled.token_ids[position], position, context))
                slot = self.kv.slot(table, position)
                if position >= scheduled.num_written_tokens:
                    require(slot not in written, f"two sequences write slot {slot}")
                    written.add(slot)
                    self.kv.slots[slot] = value
                state = hash((state, self.kv.slots.get(slot, -1)))
        return self._sample(scheduled, state)

    def _sample(self, scheduled: ScheduledSequence, state: int) -> int:
        token_id = self.choose(scheduled) if self.choose is not None else None
        if token_id is None and isinstance(scheduled.grammar, FakeGrammar):
            allowed = scheduled.grammar.next_token_ids
            return min(allowed - set(scheduled.banned_token_ids) or allowed)
        if token_id is None:
            token_id = hash((state, scheduled.seed)) % self.vocab_size
        while token_id in scheduled.banned_token_ids:
            token_id = (token_id + 1) % self.vocab_size
        return token_id


class FakeGrammar:
    """Allows the given sets of tokens one after the other; where None stands it gives up.

    is_open: after the last set anything but a token may come, so it is not complete
    """

    def __init__(self, allowed: Sequence[set[int] | None], end_token_ids: tuple[int, ...] = (), is_open: bool = False):
        self.allowed = list(allowed)
        self.end_token_ids = end_token_ids
        self.is_open = is_open
        self.accepted: list[int] = []

    @property
    def next_token_ids(self) -> set[int]:
        position = len(self.accepted)
        if position >= len(self.allowed):
            return set(self.end_token_ids)
        allowed = self.allowed[position]
        if allowed is None:
            raise RequestFailedError("The fake grammar gives up.")
        return allowed

    def write_mask(self, mask: Any) -> None:
        mask.fill(0)
        words = mask.view("uint32")
        for token_id in self.next_token_ids:
            words[token_id // 32] |= 1 << token_id % 32

    def accept(self, token_id: int) -> None:
        if token_id not in self.next_token_ids:
            raise ValueError(f"token {token_id} is not allowed")
        self.accepted.append(token_id)

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= len(self.allowed) and not self.is_open
