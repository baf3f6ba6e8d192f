"""A plan as arrays, every number asserted on tiny plans, and against a slow twin on random ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo.core.interfaces import ScheduledSequence, SchedulerOutput
from octavo.core.sampling_params import SamplingParams
from octavo.executor.forward_batch import BlockTableRows, ForwardBatchBuilder
from octavo.ops.interface import ForwardBatch

BLOCK_SIZE = 4
PARAMS = SamplingParams()


def scheduled(seq_id: int, tables: list[list[int]], start: int, count: int, **changes: Any) -> ScheduledSequence:
    """A sequence whose token at position p is 100 * seq_id + p."""
    fields: dict[str, Any] = {
        "seq_id": seq_id,
        "token_ids": [100 * seq_id + position for position in range(start + count)],
        "num_prompt_tokens": start + count,
        "num_computed_tokens": start,
        "num_scheduled_tokens": count,
        "num_written_tokens": start,
        "block_tables": tables,
        "is_sampling": True,
        "sampling_params": PARAMS,
        "seed": 0,
    }
    return ScheduledSequence(**(fields | changes))


def make_builder(num_groups: int = 1) -> ForwardBatchBuilder:
    return ForwardBatchBuilder(BLOCK_SIZE, num_groups, [0, num_groups - 1])


def build(builder: ForwardBatchBuilder, *sequences: ScheduledSequence) -> ForwardBatch:
    return builder.build(SchedulerOutput(scheduled=list(sequences)))


def test_a_chunk_and_two_decoding_sequences_side_by_side() -> None:
    batch = build(
        make_builder(),
        scheduled(1, [[7, 3]], start=6, count=1),
        scheduled(2, [[0, 5, 9]], start=3, count=6, is_sampling=False),
        scheduled(3, [[2]], start=0, count=1),
    )
    assert batch.token_ids.tolist() == [106, 203, 204, 205, 206, 207, 208, 300]
    assert batch.positions.tolist() == [6, 3, 4, 5, 6, 7, 8, 0]
    assert batch.logits_rows.tolist() == [0, 7]
    assert batch.layer_group == [0, 0]
    (attention,) = batch.attention
    assert attention.query_start.tolist() == [0, 1, 7, 8]
    assert attention.context_lens.tolist() == [7, 9, 1]
    assert attention.block_tables.tolist() == [[7, 3, -1], [0, 5, 9], [2, -1, -1]]
    assert attention.slot_mapping.tolist() == [14, 3, 20, 21, 22, 23, 36, 8]


def test_dtypes_are_the_interfaces() -> None:
    for batch in (
        build(make_builder(), scheduled(1, [[0]], 0, 3)),
        build(make_builder(), scheduled(1, [[0]], 2, 1)),
    ):
        attention = batch.attention[0]
        assert batch.token_ids.dtype == batch.positions.dtype == batch.logits_rows.dtype == np.int32
        assert attention.query_start.dtype == attention.context_lens.dtype == attention.block_tables.dtype == np.int32
        assert attention.slot_mapping.dtype == np.int64


def test_positions_already_written_get_no_slot() -> None:
    # A full prefix hit of 8 tokens: the last is computed again for its logits, but its block is shared.
    batch = build(make_builder(), scheduled(1, [[4, 6]], start=7, count=1, num_written_tokens=8))
    assert batch.attention[0].slot_mapping.tolist() == [-1]
    assert batch.attention[0].context_lens.tolist() == [8]
    assert batch.logits_rows.tolist() == [0]


def test_a_step_without_a_sampling_sequence_wants_no_logits() -> None:
    batch = build(make_builder(), scheduled(1, [[4]], start=0, count=3, is_sampling=False))
    assert batch.logits_rows.tolist() == []


def test_each_group_has_its_own_table_and_slots() -> None:
    batch = build(make_builder(2), scheduled(1, [[-1, 8, 1], [3, 4, 5]], start=9, count=1))
    window, full = batch.attention
    assert window.block_tables.tolist() == [[-1, 8, 1]]
    assert window.slot_mapping.tolist() == [5]
    assert full.block_tables.tolist() == [[3, 4, 5]]
    assert full.slot_mapping.tolist() == [21]
    assert batch.layer_group == [0, 1]


def test_a_table_that_the_core_changes_in_place_is_noticed() -> None:
    builder = make_builder()
    table = [1, 2]

    def rows() -> list[list[int]]:
        batch = build(builder, scheduled(5, [table], start=len(table) * BLOCK_SIZE - 1, count=1))
        return batch.attention[0].block_tables.tolist()

    assert rows() == [[1, 2]]
    table.append(3)
    assert rows() == [[1, 2, 3]]
    table[0] = -1  # a window let it go
    assert rows() == [[-1, 2, 3]]
    table[2] = 9  # copy on write
    assert rows() == [[-1, 2, 9]]
    table[1] = -1
    table.append(4)  # both at once
    assert rows() == [[-1, -1, 9, 4]]
    table[:] = [6]  # preempted, and back in one step
    assert rows() == [[6]]


def test_what_was_dropped_leaves_no_trace_in_the_next_sequences_row() -> None:
    builder = make_builder()
    build(builder, scheduled(1, [[1, 2, 3]], start=11, count=1))
    builder.drop([1, 77])
    assert builder.num_kept_sequences == 0
    batch = build(builder, scheduled(2, [[5]], 3, 1), scheduled(3, [[6, 7, 8]], 11, 1))
    assert batch.attention[0].block_tables.tolist() == [[5, -1, -1], [6, 7, 8]]


def test_a_position_to_write_without_a_block_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        build(make_builder(), scheduled(1, [[-1, 3]], start=3, count=2))


def test_rows_grow_with_more_sequences_and_longer_tables() -> None:
    rows = BlockTableRows()
    tables = {seq_id: list(range(seq_id, seq_id + 3 * seq_id + 1)) for seq_id in range(100)}
    row_of = [rows.set_table(seq_id, table) for seq_id, table in tables.items()]
    gathered = rows.gather(row_of, 300)
    for seq_id, table in tables.items():
        assert gathered[seq_id].tolist() == table + [-1] * (300 - len(table))
    assert len(rows) == 100


def obvious_batch(sequences: list[ScheduledSequence], group: int) -> tuple[list[int], list[int], list[int]]:
    """(token ids, positions, slots), row by row."""
    tokens, positions, slots = [], [], []
    for sequence in sequences:
        for position in range(
            sequence.num_computed_tokens, sequence.num_computed_tokens + sequence.num_scheduled_tokens
        ):
            block_id = sequence.block_tables[group][position // BLOCK_SIZE]
            tokens.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(
                -1 if position < sequence.num_written_tokens else block_id * BLOCK_SIZE + position % BLOCK_SIZE
            )
    return tokens, positions, slots


@pytest.mark.parametrize("trial", range(20))
def test_many_steps_of_random_plans_match_the_slow_twin(trial: int) -> None:
    rng = random.Random(trial)
    builder = make_builder(2)
    lengths: dict[int, int] = {}
    tables: dict[int, list[list[int]]] = {}
    for step in range(30):
        if step % 3 == 0:
            lengths[step], tables[step] = 0, [[], []]
        if lengths and rng.random() < 0.2:
            gone = rng.choice(list(lengths))
            builder.drop([gone])
            del lengths[gone], tables[gone]
        plan = []
        for seq_id in rng.sample(list(lengths), k=len(lengths)):
            start, count = lengths[seq_id], rng.choice([1, 1, 1, 7])
            for table in tables[seq_id]:
                while len(table) * BLOCK_SIZE < start + count:
                    table.append(rng.randrange(1000))
            window = tables[seq_id][0]
            for index in range(max(0, start // BLOCK_SIZE - 1)):
                window[index] = -1
            plan.append(scheduled(seq_id, tables[seq_id], start, count))
            lengths[seq_id] += count
        if not plan:
            continue
        batch = build(builder, *plan)
        for group in (0, 1):
            tokens, positions, slots = obvious_batch(plan, group)
            assert batch.token_ids.tolist() == tokens
            assert batch.positions.tolist() == positions
            assert batch.attention[group].slot_mapping.tolist() == slots
            width = max(len(sequence.block_tables[group]) for sequence in plan)
            assert batch.attention[group].block_tables.tolist() == [
                sequence.block_tables[group] + [-1] * (width - len(sequence.block_tables[group])) for sequence in plan
            ]


@pytest.mark.parametrize("seed", range(20))
def test_single_rows_are_built_as_the_general_case_builds_them(seed: int) -> None:
    rng = random.Random(seed)
    builders = make_builder(2), make_builder(2)
    for _ in range(3):
        sequences = []
        for seq_id in rng.sample(range(40), rng.randint(1, 20)):
            start = rng.randrange(30)
            num_blocks = start // BLOCK_SIZE + 1 + rng.randrange(2)
            tables = [rng.sample(range(1000), num_blocks) for _ in range(2)]
            num_let_go = rng.randrange(start // BLOCK_SIZE + 1)
            tables[1][:num_let_go] = [-1] * num_let_go
            num_written = start + rng.randrange(2)
            sequences.append(
                scheduled(seq_id, tables, start, 1, is_sampling=rng.random() < 0.8, num_written_tokens=num_written)
            )
        single = builders[0]._build_single_rows(sequences)
        general = builders[1]._build_chunks(sequences)
        pairs = [
            (single.token_ids, general.token_ids),
            (single.positions, general.positions),
            (single.logits_rows, general.logits_rows),
        ]
        for one, other in zip(single.attention, general.attention, strict=True):
            pairs += [
                (one.query_start, other.query_start),
                (one.context_lens, other.context_lens),
                (one.block_tables, other.block_tables),
                (one.slot_mapping, other.slot_mapping),
            ]
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
