from __future__ import annotations

import pytest

from octavo.core.block_pool import BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.take_block() for _ in range(count)]


def test_blocks_are_given_out_in_order_and_a_freed_one_is_used_again_first() -> None:
    pool = BlockPool(4)
    assert take(pool, 3) == [0, 1, 2]
    pool.free_block(1)
    assert take(pool, 2) == [1, 3]
    assert pool.num_available_blocks == 0


def test_a_freed_block_with_a_known_prefix_stays_findable_until_it_is_needed() -> None:
    pool = BlockPool(2)
    (block_id,) = take(pool, 1)
    pool.publish_block(block_id, b"prefix", 0)
    pool.free_block(block_id)
    assert (pool.num_cached_blocks, pool.num_available_blocks) == (1, 2)
    assert pool.find_block(b"prefix", 0) == block_id
    assert pool.take_block() == 1, "the block that is worth nothing goes first"
    assert pool.find_block(b"prefix", 0) == block_id
    pool.check_invariants()


def test_an_evicted_prefix_is_never_found_again() -> None:
    # kvcached#362: the map and the block disagreed after reuse.
    pool = BlockPool(1)
    pool.publish_block(pool.take_block(), b"old", 0)
    pool.free_block(0)
    assert pool.take_block() == 0
    assert pool.find_block(b"old", 0) is None
    pool.publish_block(0, b"new", 0)
    pool.free_block(0)
    assert pool.find_block(b"old", 0) is None
    assert pool.find_block(b"new", 0) == 0
    pool.check_invariants()


def test_the_prefix_unused_for_longest_is_evicted_first() -> None:
    pool = BlockPool(3)
    for block_id, name in zip(take(pool, 3), (b"a", b"b", b"c"), strict=True):
        pool.publish_block(block_id, name, 0)
    for block_id in (0, 1, 2):
        pool.free_block(block_id)
    pool.share_block(0)  # a hit on the oldest
    pool.free_block(0)
    assert take(pool, 3) == [1, 2, 0]


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(2)
    pool.take_block()
    pool.share_block(0)
    pool.free_block(0)
    assert pool.num_available_blocks == 1
    pool.free_block(0)
    assert pool.num_available_blocks == 2
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free_block(0)


def test_of_two_blocks_with_the_same_content_the_first_is_known() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.publish_block(first, b"same", 0)
    pool.publish_block(second, b"same", 0)
    assert pool.find_block(b"same", 0) == first
    pool.free_block(second)
    assert pool.num_cached_blocks == 0
    pool.check_invariants()


def test_the_same_hash_in_two_groups_is_two_blocks() -> None:
    pool = BlockPool(2)
    for group, block_id in enumerate(take(pool, 2)):
        pool.publish_block(block_id, b"hash", group)
    assert [pool.find_block(b"hash", group) for group in (0, 1, 2)] == [0, 1, None]


def test_a_forgotten_block_is_not_found_and_a_reset_forgets_all() -> None:
    pool = BlockPool(3)
    for block_id, name in zip(take(pool, 3), (b"a", b"b", b"c"), strict=True):
        pool.publish_block(block_id, name, 0)
    pool.forget_block(1)
    assert pool.find_block(b"b", 0) is None
    pool.free_block(0)
    pool.forget_all_blocks()
    assert pool.find_block(b"a", 0) is None
    assert pool.find_block(b"c", 0) is None
    assert pool.num_cached_blocks == 0
    pool.check_invariants()
