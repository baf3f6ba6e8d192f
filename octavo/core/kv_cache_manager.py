"""Everything about KV memory: block tables, prefix hits, windows, forks, copy on write. Standard library only."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import CoreConfig
from octavo.core.sequence import Sequence

BlockCopy = tuple[int, int]  # (source, destination)
_NO_COPIES: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the prefix cache has for a sequence that is to be admitted.

    num_tokens:          the prefix whose keys and values are there
    num_computed_tokens: the same, but one less when that is all the sequence has: its last token is computed again,
                         as a full prefix hit would leave no logits to sample from
    block_tables:        one list a group, -1 for blocks that no later position can see
    next_hash:           of the first block that is lacking; None when no full block is
    """

    num_tokens: int
    num_computed_tokens: int
    block_tables: list[list[int]]
    next_hash: bytes | None


class KVCacheManager:
    """Changes block tables and the pool together, so that a block's ref_count is the number of tables that hold it.

    Does nothing by time or by step: the scheduler says when. All methods cost O(what changes), none O(pool).
    """

    def __init__(self, config: CoreConfig) -> None:
        self.block_size = config.block_size
        self.windows = config.kv_group_windows
        self.pool = BlockPool(config.num_blocks)
        self.has_prefix_caching = config.enable_prefix_caching
        self.forks: dict[int, Sequence] = {}  # waiting sequences that hold a sibling's prompt blocks, oldest first
        self._max_chunk = config.max_num_batched_tokens
        self._full_groups = [group for group, window in enumerate(self.windows) if window is None]
        self._window_groups = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        self._in_flight: dict[bytes, int] = {}  # block hash -> the running sequence that is computing it
        self._epoch = 0  # rises when the prefix cache is reset: hashes of before never match hashes of after
        self._no_hit = PrefixHit(0, 0, [[] for _ in self.windows], None)
        self._last_lookup: tuple[int, int, int, PrefixHit] | None = None  # seq_id, num_tokens, pool version, answer

    # --- sizes ------------------------------------------------------------------------------------------------

    def count_max_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence alone ever holds while `num_tokens` of its tokens get computed."""
        return sum(self._count_group_blocks(num_tokens, window) for window in self.windows)

    def _count_group_blocks(self, num_tokens: int, window: int | None) -> int:
        num_blocks = -(-num_tokens // self.block_size)
        if window is None:
            return num_blocks
        # While positions [p, p + chunk) are computed, [p - window + 1, p + chunk) are held; a run of m positions
        # that starts anywhere touches at most ceil((m - 1) / block_size) + 1 blocks.
        num_visible = window - 1 + self._max_chunk
        return min(num_blocks, -(-(num_visible - 1) // self.block_size) + 1)

    # --- admission --------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """The longest prefix of all the sequence's tokens that the cache has for every group."""
        if not self.has_prefix_caching or sequence.scores_prompt:
            return self._no_hit
        num_tokens = len(sequence.token_ids)
        last = self._last_lookup
        if last is not None and last[:3] == (sequence.seq_id, num_tokens, self.pool.version):
            return last[3]
        hit = self._look_up(sequence, num_tokens)
        self._last_lookup = (sequence.seq_id, num_tokens, self.pool.version, hit)
        return hit

    def _look_up(self, sequence: Sequence, num_tokens: int) -> PrefixHit:
        hashes = self._hash_blocks(sequence, num_tokens // self.block_size)
        find_block = self.pool.find_block
        num_hits = len(hashes)
        for group in self._full_groups:
            num_hits = next((i for i in range(num_hits) if find_block(hashes[i], group) is None), num_hits)
        num_hits = self._fit_windows(hashes, num_hits, num_tokens)

        is_full_hit = num_hits * self.block_size == num_tokens
        tables = []
        for group, window in enumerate(self.windows):
            first = self._first_visible_block(num_hits * self.block_size - is_full_hit, window)
            table = [-1] * min(first, num_hits)
            table += [block for i in range(first, num_hits) if (block := find_block(hashes[i], group)) is not None]
            tables.append(table)
        return PrefixHit(
            num_tokens=num_hits * self.block_size,
            num_computed_tokens=num_hits * self.block_size - is_full_hit,
            block_tables=tables,
            next_hash=hashes[num_hits] if num_hits < len(hashes) else None,
        )

    def _fit_windows(self, hashes: list[bytes], num_hits: int, num_tokens: int) -> int:
        """The largest number of blocks, up to num_hits, at which every window group has all that is visible.

        blocks    0   1   2   3 | 4         at 4 blocks, the next position sees blocks 2 and 3; when block 2 is
        cached    x   x   -   x |           missing, so it is for 3 blocks, and 2 blocks is the next to try
        """
        while num_hits > 0:
            missing = -1
            for group, window in self._window_groups:
                next_position = num_hits * self.block_size - (num_hits * self.block_size == num_tokens)
                first = self._first_visible_block(next_position, window)
                for i in range(num_hits - 1, first - 1, -1):
                    if self.pool.find_block(hashes[i], group) is None:
                        missing = i
                        break
                if missing >= 0:
                    break
            if missing < 0:
                break
            num_hits = missing
        return num_hits

    def _first_visible_block(self, position: int, window: int | None) -> int:
        """The block of the first position that `position` sees, itself included in the window."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def is_in_flight(self, block_hash: bytes | None) -> bool:
        """A running sequence is computing this block right now."""
        return block_hash in self._in_flight

    def can_admit(self, sequence: Sequence) -> bool:
        """Enough blocks for all tokens the sequence has, so that what is begun is likely to be finished.

        With sliding windows and chunks it holds less at any time than it takes in all.
        """
        if sequence.holds_blocks:
            return True
        hit = self.find_prefix(sequence)
        num_tokens = len(sequence.token_ids)
        num_blocks = -(-num_tokens // self.block_size)
        blocks = self.pool.blocks
        num_required = 0
        for table, window in zip(hit.block_tables, self.windows, strict=True):
            num_revived = sum(1 for block_id in table if block_id >= 0 and blocks[block_id].ref_count == 0)
            num_taken = num_blocks - len(table) + num_revived
            num_required += min(num_taken, self._count_group_blocks(num_tokens, window))
        return num_required <= self.pool.num_available_blocks

    def admit(self, sequence: Sequence) -> PrefixHit | None:
        """Give a sequence its prefix hit and announce what it will compute. None for a fork, which has its blocks."""
        sequence.awaited_hash = None
        if sequence.holds_blocks:
            del self.forks[sequence.seq_id]
            return None
        hit = self.find_prefix(sequence)
        for group, table in enumerate(hit.block_tables):
            num_let_go = 0
            for block_id in table:
                if block_id >= 0:
                    self.pool.share_block(block_id)
                else:
                    num_let_go += 1
            sequence.block_tables[group][:] = table
            sequence.num_let_go_blocks[group] = num_let_go
        sequence.num_computed_tokens = hit.num_computed_tokens
        sequence.num_written_tokens = hit.num_tokens
        if self.has_prefix_caching:
            sequence.num_published_blocks = hit.num_tokens // self.block_size
            sequence.num_in_flight_blocks = len(sequence.token_ids) // self.block_size
            hashes = self._hash_blocks(sequence, sequence.num_in_flight_blocks)
            for i in range(sequence.num_published_blocks, sequence.num_in_flight_blocks):
                self._in_flight.setdefault(hashes[i], sequence.seq_id)
        return hit

    # --- a step -----------------------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> Iterable[BlockCopy] | None:
        """Make room for the next tokens; None when blocks are lacking, and then nothing has changed.

        Returns the copies to be made before the step. A copied source stays held until `free_copy_sources`: the
        executor may have to copy it again when a step fails, so until then nobody may write to it.
        """
        block_size = self.block_size
        end = sequence.num_computed_tokens + num_new_tokens
        write_start = max(sequence.num_written_tokens, sequence.num_computed_tokens)
        tables = sequence.block_tables
        num_new_blocks = -(-end // block_size) - len(tables[0])
        # Only the first block that is written can be somebody else's too: the ones after it are new.
        writes_into_block = write_start % block_size != 0 and write_start < end
        if num_new_blocks <= 0 and not writes_into_block:
            return _NO_COPIES

        pool = self.pool
        index = write_start // block_size
        num_shared = 0
        if writes_into_block:
            for table in tables:
                if pool.blocks[table[index]].ref_count > 1:
                    num_shared += 1
        num_lacking = max(num_new_blocks, 0) * len(tables) + num_shared
        if num_lacking > pool.num_available_blocks:
            return None

        copies: list[BlockCopy] | tuple[BlockCopy, ...] = _NO_COPIES
        if writes_into_block:
            copies = self._make_writable(tables, index) if num_shared else _NO_COPIES
            for table in tables:
                # Ours alone now, but perhaps still known for the tokens of a sibling that went on in it.
                pool.forget_block(table[index])
        for _ in range(num_new_blocks):
            for table in tables:
                table.append(pool.take_block())
        return copies

    def _make_writable(self, tables: list[list[int]], index: int) -> list[BlockCopy]:
        copies = []
        for table in tables:
            source = table[index]
            if self.pool.blocks[source].ref_count > 1:
                table[index] = self.pool.take_block()
                copies.append((source, table[index]))
        return copies

    def free_copy_sources(self, copies: Iterable[BlockCopy]) -> None:
        for source, _ in copies:
            self.pool.free_block(source)

    def publish(self, sequence: Sequence) -> None:
        """Let the blocks that are full by now be found."""
        num_full_blocks = sequence.num_computed_tokens // self.block_size
        if not self.has_prefix_caching or num_full_blocks <= sequence.num_published_blocks:
            return
        hashes = self._hash_blocks(sequence, num_full_blocks)
        for i in range(sequence.num_published_blocks, num_full_blocks):
            for group, table in enumerate(sequence.block_tables):
                if table[i] >= 0:
                    self.pool.publish_block(table[i], hashes[i], group)
            self._land(hashes[i], sequence)
        sequence.num_published_blocks = num_full_blocks

    def free_outside_windows(self, sequence: Sequence) -> None:
        """Let go, in place, of blocks that no position still to be computed can see.

        window 6, position 9 is next     | 0  1  2  3 | 4  5  6  7 | 8  9        sees 4 to 9: block 0 goes
        """
        for group, window in self._window_groups:
            first = self._first_visible_block(sequence.num_computed_tokens, window)
            num_let_go = sequence.num_let_go_blocks[group]
            if first > num_let_go:
                table = sequence.block_tables[group]
                for i in range(num_let_go, first):
                    self.pool.free_block(table[i])
                    table[i] = -1
                sequence.num_let_go_blocks[group] = first

    # --- forks ------------------------------------------------------------------------------------------------

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """The sibling takes the leader's computed prompt blocks, the partly filled last one too.

        Must come before the leader lets go of blocks outside its windows: the sibling's next position is one earlier.
        """
        num_prompt_tokens = leader.num_prompt_tokens
        num_blocks = -(-num_prompt_tokens // self.block_size)
        for group, table in enumerate(leader.block_tables):
            shared = table[:num_blocks]
            for block_id in shared:
                if block_id >= 0:
                    self.pool.share_block(block_id)
            sibling.block_tables[group][:] = shared
            sibling.num_let_go_blocks[group] = leader.num_let_go_blocks[group]
        sibling.num_computed_tokens = num_prompt_tokens - 1
        sibling.num_written_tokens = num_prompt_tokens
        num_full_blocks = num_prompt_tokens // self.block_size
        if self.has_prefix_caching:
            sibling.block_hashes = leader.block_hashes[:num_full_blocks]
            sibling.num_published_blocks = num_full_blocks
            sibling.num_in_flight_blocks = num_full_blocks
        sibling.awaited_hash = None
        self.free_outside_windows(sibling)
        self.forks[sibling.seq_id] = sibling

    def free_newest_fork(self) -> bool:
        """A waiting fork gives up what it holds and will compute or find its prompt like anyone else."""
        if not self.forks:
            return False
        self.free(self.forks[next(reversed(self.forks))])
        return True

    # --- the end ----------------------------------------------------------------------------------------------

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks; the full ones stay findable. Tail blocks first, so that prefixes live longest."""
        for row in reversed(list(zip(*sequence.block_tables, strict=True))):
            for block_id in row:
                if block_id >= 0:
                    self.pool.free_block(block_id)
        self._clear(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Give back all blocks of a failed sequence and forget those it held alone: who knows what is in them."""
        for table in sequence.block_tables:
            for block_id in table:
                if block_id >= 0 and self.pool.blocks[block_id].ref_count == 1:
                    self.pool.forget_block(block_id)
        self.free(sequence)

    def reset_prefix_cache(self, sequences: Iterable[Sequence]) -> None:
        """No sequence added from now on finds a block computed before. Those that hold blocks go on with them."""
        self._epoch += 1
        self.pool.forget_all_blocks()
        for sequence in sequences:
            if not sequence.holds_blocks:
                sequence.block_hashes = []
                sequence.awaited_hash = None

    def _clear(self, sequence: Sequence) -> None:
        self.forks.pop(sequence.seq_id, None)
        for i in range(sequence.num_published_blocks, sequence.num_in_flight_blocks):
            self._land(sequence.block_hashes[i], sequence)
        for group, table in enumerate(sequence.block_tables):
            table.clear()
            sequence.num_let_go_blocks[group] = 0
        sequence.num_computed_tokens = 0
        sequence.num_written_tokens = 0
        sequence.num_published_blocks = 0
        sequence.num_in_flight_blocks = 0

    def _land(self, block_hash: bytes, sequence: Sequence) -> None:
        if self._in_flight.get(block_hash) == sequence.seq_id:
            del self._in_flight[block_hash]

    # --- hashes -----------------------------------------------------------------------------------------------

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The sequence's own list, extended to at least `num_blocks`. A hash chains its parent's and its tokens; the
        first one's parent is whatever else changes keys and values, or who may share them."""
        hashes = sequence.block_hashes
        block_size = self.block_size
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else self._hash_root(sequence)
            for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
                tokens = array("q", sequence.token_ids[start : start + block_size]).tobytes()
                parent = hashlib.blake2b(parent + tokens, digest_size=32).digest()
                hashes.append(parent)
        return hashes

    def _hash_root(self, sequence: Sequence) -> bytes:
        namespace = f"{self._epoch}:{sequence.request.cache_salt}"
        return hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=32).digest()

    # --- checks -----------------------------------------------------------------------------------------------

    def check_invariants(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Between steps. O(num_blocks), for tests and debugging."""
        self.pool.check_invariants()
        running_ids = {sequence.seq_id for sequence in running}
        assert running_ids >= set(self._in_flight.values()), (running_ids, self._in_flight)
        assert {sequence.seq_id for sequence in waiting} >= set(self.forks), self.forks
        num_holders = [0] * self.pool.num_blocks
        for sequence in (*running, *waiting):
            lengths = {len(table) for table in sequence.block_tables}
            assert len(lengths) == 1, sequence
            assert sequence.num_written_tokens >= sequence.num_computed_tokens, sequence
            assert len(sequence.block_tables[0]) * self.block_size >= sequence.num_written_tokens, sequence
            for table, num_let_go, window in zip(
                sequence.block_tables, sequence.num_let_go_blocks, self.windows, strict=True
            ):
                assert all((block_id < 0) == (i < num_let_go) for i, block_id in enumerate(table)), sequence
                assert num_let_go <= self._first_visible_block(sequence.num_computed_tokens, window), sequence
                for block_id in table[num_let_go:]:
                    num_holders[block_id] += 1
        for block, num_tables in zip(self.pool.blocks, num_holders, strict=True):
            assert block.ref_count == num_tables, f"{block} is in {num_tables} tables"
