"""The plan of a step as the arrays that the model reads. Runs before every forward pass, so it must be quick.

What is kept between steps is a copy of each sequence's block tables, as lists (to see what changed) and as rows of one
array a group (to be gathered in one call). Comparing two lists that share their entries costs about 3 ns an entry;
converting one to an array costs ten times that, so a row is only written again where it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from octavo.core.interfaces import ScheduledSequence, SchedulerOutput
from octavo.ops.interface import Array, AttentionBatch, ForwardBatch

_FIRST_NUM_ROWS = 16
_FIRST_NUM_BLOCKS = 64
_ONE = np.int32(1)


class BlockTableRows:
    """One KV cache group's block tables, one row of an int32 array a sequence; -1 beyond a table's end."""

    def __init__(self) -> None:
        self._rows = np.full((_FIRST_NUM_ROWS, _FIRST_NUM_BLOCKS), -1, np.int32)
        self._row_of: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}  # what is in the row
        self._free_rows = list(range(_FIRST_NUM_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def set_table(self, seq_id: int, table: list[int]) -> int:
        """Make the sequence's row equal to `table`, which the core may change in place later. Returns the row."""
        row = self._row_of.get(seq_id)
        if row is None:
            row = self._take_row(seq_id)
        elif self._tables[seq_id] == table:
            return row
        known = self._tables[seq_id]
        num_known, num_blocks = len(known), len(table)
        if num_blocks > self._rows.shape[1]:
            self._grow(len(self._rows), max(num_blocks, 2 * self._rows.shape[1]))
        if num_blocks > num_known and table[:num_known] == known:
            self._rows[row, num_known:num_blocks] = table[num_known:]
            known += table[num_known:]
            return row
        # A window let blocks go, a shared block was copied, or the sequence was preempted and came back.
        self._rows[row, :num_blocks] = table
        self._rows[row, num_blocks:num_known] = -1
        self._tables[seq_id] = list(table)
        return row

    def drop(self, seq_id: int) -> None:
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            self._rows[row, : len(self._tables.pop(seq_id))] = -1
            self._free_rows.append(row)

    def gather(self, rows: Sequence[int], num_blocks: int) -> np.ndarray:
        """[len(rows), num_blocks] int32, a new array."""
        return self._rows[:, :num_blocks].take(rows, axis=0)

    def _take_row(self, seq_id: int) -> int:
        if not self._free_rows:
            num_rows = len(self._rows)
            self._grow(2 * num_rows, self._rows.shape[1])
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        row = self._row_of[seq_id] = self._free_rows.pop()
        self._tables[seq_id] = []
        return row

    def _grow(self, num_rows: int, num_blocks: int) -> None:
        grown = np.full((num_rows, num_blocks), -1, np.int32)
        grown[: self._rows.shape[0], : self._rows.shape[1]] = self._rows
        self._rows = grown


class ForwardBatchBuilder:
    """layer_group: for each layer, the index of its KV cache group; to_device: the backend's"""

    def __init__(
        self,
        block_size: int,
        num_groups: int,
        layer_group: Sequence[int],
        to_device: Callable[[np.ndarray], Array] = np.ascontiguousarray,
    ):
        self._block_size = block_size
        self._to_device = to_device
        self._layer_group = layer_group
        self._groups = [BlockTableRows() for _ in range(num_groups)]
        self._numbers = to_device(np.arange(_FIRST_NUM_ROWS, dtype=np.int32))

    @property
    def num_kept_sequences(self) -> int:
        return len(self._groups[0])

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences that ended or were preempted; unknown ones are fine."""
        for group in self._groups:
            for seq_id in seq_ids:
                group.drop(seq_id)

    def build(self, plan: SchedulerOutput) -> ForwardBatch:
        """Rows in the order of plan.scheduled, which must not be empty; on the device, with the interface's dtypes.

        Asserts that each position to be written has a block: the core's promise.
        """
        scheduled = plan.scheduled
        if all(sequence.num_scheduled_tokens == 1 for sequence in scheduled):
            return self._build_single_rows(scheduled)
        return self._build_chunks(scheduled)

    def _build_single_rows(self, scheduled: list[ScheduledSequence]) -> ForwardBatch:
        """One row a sequence: what most steps are. The same as the general case, with a third of its NumPy calls: in a
        small step each costs microseconds, as the weights have pushed it out of the caches since the last one."""
        block_size, num_seqs = self._block_size, len(scheduled)
        positions = [sequence.num_computed_tokens for sequence in scheduled]
        tokens = [sequence.token_ids[position] for sequence, position in zip(scheduled, positions, strict=True)]
        # One conversion and one move for both: each costs as much as fifty numbers.
        numbers = np.array(tokens + positions, np.int32)
        on_device = self._to_device(numbers)
        query_start = self._count_up(num_seqs + 1)
        context_lens = self._to_device(numbers[num_seqs:] + _ONE)
        slots: list[int] = []
        for group in range(len(self._groups)):
            for sequence, position in zip(scheduled, positions, strict=True):
                is_written = position < sequence.num_written_tokens
                block = -1 if is_written else sequence.block_tables[group][position // block_size]
                assert block >= 0 or is_written, (group, sequence)
                slots.append(-1 if is_written else block * block_size + position % block_size)
        all_slots = self._to_device(np.array(slots, np.int64))
        return ForwardBatch(
            token_ids=on_device[:num_seqs],
            positions=on_device[num_seqs:],
            attention=[
                AttentionBatch(
                    query_start=query_start,
                    context_lens=context_lens,
                    block_tables=self._to_device(_gather_tables(rows, group, scheduled)),
                    slot_mapping=all_slots[group * num_seqs : (group + 1) * num_seqs],
                )
                for group, rows in enumerate(self._groups)
            ],
            layer_group=self._layer_group,
            logits_rows=(
                query_start[:-1]
                if _all_sample(scheduled)
                else self._to_device(_find_logits_rows(scheduled, np.arange(num_seqs + 1, dtype=np.int32)))
            ),
        )

    def _count_up(self, count: int) -> Array:
        """[0, 1, ..., count - 1] int32 on the device, a view of an array that nobody may change."""
        if count > self._numbers.shape[0]:
            self._numbers = self._to_device(np.arange(2 * count, dtype=np.int32))
        return self._numbers[:count]

    def _build_chunks(self, scheduled: list[ScheduledSequence]) -> ForwardBatch:
        lengths = np.array([sequence.num_scheduled_tokens for sequence in scheduled], np.int32)
        first_positions = np.array([sequence.num_computed_tokens for sequence in scheduled], np.int32)
        num_seqs = len(scheduled)
        query_start = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        num_tokens = int(query_start[-1])
        sequence_of_row = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(num_tokens, dtype=np.int32)
        positions += (first_positions - query_start[:-1])[sequence_of_row]
        num_written = np.array([sequence.num_written_tokens for sequence in scheduled], np.int32)
        is_written = positions < num_written[sequence_of_row]
        block_of_row, offset_of_row = np.divmod(positions, self._block_size)

        move = self._to_device
        starts_on_device, context_lens = move(query_start), move(first_positions + lengths)
        attention = []
        for group, rows in enumerate(self._groups):
            tables = _gather_tables(rows, group, scheduled)
            blocks = tables[sequence_of_row, block_of_row].astype(np.int64)
            slots = blocks * self._block_size
            slots += offset_of_row
            slots[is_written] = -1
            assert not ((blocks < 0) & ~is_written).any(), (group, scheduled)
            attention.append(
                AttentionBatch(
                    query_start=starts_on_device,
                    context_lens=context_lens,
                    block_tables=move(tables),
                    slot_mapping=move(slots),
                )
            )
        return ForwardBatch(
            token_ids=move(_flatten_token_ids(scheduled, num_tokens)),
            positions=move(positions),
            attention=attention,
            layer_group=self._layer_group,
            logits_rows=move(_find_logits_rows(scheduled, query_start)),
        )


def _gather_tables(rows: BlockTableRows, group: int, scheduled: list[ScheduledSequence]) -> np.ndarray:
    num_blocks = 0
    row_of: list[int] = []
    for sequence in scheduled:
        table = sequence.block_tables[group]
        row_of.append(rows.set_table(sequence.seq_id, table))
        if len(table) > num_blocks:
            num_blocks = len(table)
    return rows.gather(row_of, num_blocks)


def _all_sample(scheduled: list[ScheduledSequence]) -> bool:
    """Every row is sampled and none scored."""
    return all(sequence.is_sampling and sequence.prompt_logprobs_start is None for sequence in scheduled)


def _flatten_token_ids(scheduled: list[ScheduledSequence], num_tokens: int) -> np.ndarray:
    flat: list[int] = []
    for sequence in scheduled:
        start = sequence.num_computed_tokens
        if sequence.num_scheduled_tokens == 1:
            flat.append(sequence.token_ids[start])
        else:
            flat += sequence.token_ids[start : start + sequence.num_scheduled_tokens]
    token_ids = np.array(flat, np.int32)
    assert len(token_ids) == num_tokens, (len(token_ids), num_tokens)
    return token_ids


def _find_logits_rows(scheduled: list[ScheduledSequence], query_start: np.ndarray) -> np.ndarray:
    """The last row of each sequence that samples; behind them the rows that score prompts."""
    is_sampling = np.array([sequence.is_sampling for sequence in scheduled], bool)
    sampled = query_start[1:][is_sampling] - np.int32(1)
    scored: list[int] = []
    for sequence, start in zip(scheduled, query_start, strict=False):
        if sequence.prompt_logprobs_start is not None:
            shift = int(start) - sequence.num_computed_tokens
            scored += [position + shift for position in sequence.scored_positions]
    return np.concatenate([sampled, np.array(scored, np.int32)]) if scored else sampled
