"""The blocks of the KV cache: who is free, who is held how often, which hold a known prefix. Standard library only."""

from __future__ import annotations

from collections import OrderedDict


class Block:
    """A fixed run of KV slots of one group.

    ref_count:  the block tables that hold it (and copies of this step that still read it)
    block_hash: of the tokens up to and with this block's, once it is known to the prefix cache, else None
    group:      the KV cache group whose keys and values it holds; meaningful with a hash only
    """

    __slots__ = ("block_hash", "block_id", "group", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.group = 0

    def __repr__(self) -> str:
        known = self.block_hash.hex()[:8] if self.block_hash else "-"
        return f"<Block {self.block_id} ref={self.ref_count} {known}>"


class BlockPool:
    """Gives out blocks and takes them back; remembers prefixes until their blocks are needed.

    Every block is in exactly one state: used (ref_count > 0), cached (ref_count 0, with a hash) or free (the rest).
    `evictable` has the free and the cached ones in the order in which they are given out: free ones first, then the
    prefix that nobody has used for longest. An OrderedDict, because a prefix hit takes from the middle.

    version: changes whenever a lookup might answer differently
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.evictable: OrderedDict[int, Block] = OrderedDict((block.block_id, block) for block in self.blocks)
        self.num_cached_blocks = 0
        self.version = 0
        self._block_of_hash: dict[tuple[bytes, int], Block] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_available_blocks(self) -> int:
        """Free and cached ones: all that can be given out."""
        return len(self.evictable)

    def take_block(self) -> int:
        """A block for one holder; a prefix it still held is forgotten. There must be one available."""
        block_id, block = self.evictable.popitem(last=False)
        if block.block_hash is not None:
            self.num_cached_blocks -= 1
            self.forget_block(block_id)
        block.ref_count = 1
        return block_id

    def share_block(self, block_id: int) -> None:
        """One more holder, of a used or of a cached block."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.evictable[block_id]
            self.num_cached_blocks -= 1
        block.ref_count += 1

    def free_block(self, block_id: int) -> None:
        """One holder less. The last one leaves it cached when its prefix is known, else free."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        assert block.ref_count >= 0, f"block {block_id} was freed more often than held"
        if block.ref_count > 0:
            return
        self.evictable[block_id] = block
        if block.block_hash is None:
            # To the front: it is worth nothing, and memory that was just touched is the best to touch again.
            self.evictable.move_to_end(block_id, last=False)
        else:
            self.num_cached_blocks += 1

    def publish_block(self, block_id: int, block_hash: bytes, group: int) -> None:
        """Let a held, fully written block be found. Of two with the same content the first stays the known one."""
        key = (block_hash, group)
        if key in self._block_of_hash:
            return
        block = self.blocks[block_id]
        assert block.ref_count > 0, block
        assert block.block_hash is None, (block, block_hash.hex())
        block.block_hash = block_hash
        block.group = group
        self._block_of_hash[key] = block
        self.version += 1

    def find_block(self, block_hash: bytes, group: int) -> int | None:
        block = self._block_of_hash.get((block_hash, group))
        return None if block is None else block.block_id

    def forget_block(self, block_id: int) -> None:
        """A held block is no longer found, because its content is about to change or is not to be trusted."""
        block = self.blocks[block_id]
        if block.block_hash is not None:
            del self._block_of_hash[block.block_hash, block.group]
            block.block_hash = None
            self.version += 1

    def forget_all_blocks(self) -> None:
        for block in self._block_of_hash.values():
            block.block_hash = None
        self._block_of_hash.clear()
        self.num_cached_blocks = 0
        self.version += 1

    def check_invariants(self) -> None:
        """O(num_blocks); for tests and debugging."""
        num_used = sum(block.ref_count > 0 for block in self.blocks)
        assert num_used + len(self.evictable) == len(self.blocks), (num_used, len(self.evictable), len(self.blocks))
        num_cached = sum(block.ref_count == 0 and block.block_hash is not None for block in self.blocks)
        assert num_cached == self.num_cached_blocks, (num_cached, self.num_cached_blocks)
        for block_id, block in self.evictable.items():
            assert block.block_id == block_id, (block, block_id)
            assert block.ref_count == 0, block
        for (block_hash, group), block in self._block_of_hash.items():
            assert (block.block_hash, block.group) == (block_hash, group), (block, block_hash.hex(), group)
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        assert num_hashed == len(self._block_of_hash), (num_hashed, len(self._block_of_hash))
