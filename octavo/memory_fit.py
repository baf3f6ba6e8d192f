"""The longest sequence and the largest pool that the memory allows, or why what was typed cannot be.

Pure arithmetic on numbers that others measured. Imports engine_args, the machine's description, report and errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from octavo.engine_args import MIN_MAX_MODEL_LEN, EngineArgs, refuse
from octavo.errors import ConfigError
from octavo.machine import Machine
from octavo.report import format_bytes

# A desktop's RAM is shared with a browser and an editor; a GPU's memory is nobody else's (0.9 there).
DEFAULT_CPU_MEMORY_UTILIZATION = 0.5
# When the default share is too small for the weights and one sequence we go on up to this share of what is free.
_MAX_SHARE_OF_AVAILABLE = 0.9
# Unless the user gave us memory, the cache takes no more than this, or an eighth of RAM, or what one full-length
# sequence needs: the pool fills up with cached prefixes over the days, whatever the load.
_DEFAULT_POOL_BYTES = 4 * 2**30
# A CPU's matmuls stop gaining from more rows at about 32 to 64: beyond it more sequences only make each slower, and are
# better off in the queue.
DEFAULT_MAX_NUM_SEQS = 64
# A step's tokens are the longest pause between two tokens of a running sequence. 512 rows are enough to keep the
# arithmetic units busy, and a prefill chunk of them takes a small model well under a second.
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
_KV_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_KV_SCALE_BYTES = 4  # a float32
# An allowance for interpreter, libraries and bookkeeping; 45 MiB of it are in use when all is imported.
_PROCESS_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the resolution must know of a model.

    window:               the longest sequence it was made for, in tokens
    kv_group_windows:     one entry a KV cache group, as in CoreConfig
    kv_elements_per_slot: numbers stored for one token in one block: layers of a group x 2 x KV heads x head size
    kv_vectors_per_slot:  keys and values, one a head, that these are the numbers of: in 8-bit codes each has a scale
    row_elements:         float32 numbers that are alive at once for one token of a step (activations)
    stored_quantization:  how the checkpoint has its weights in codes ("gguf", "gptq", ...), None for floats
    is_reordered:         whether some of them have an activation order, which cannot be kept in codes
    lora_elements_per_rank: numbers in an adapter of rank 1 on all projections: their inputs and outputs, of all layers
    """

    name: str
    architecture: str
    window: int
    vocab_size: int
    kv_group_windows: tuple[int | None, ...]
    kv_elements_per_slot: int
    kv_vectors_per_slot: int
    row_elements: int
    stored_quantization: str | None = None
    is_reordered: bool = False
    lora_elements_per_rank: int = 0

    def count_slot_bytes(self, kv_cache_dtype: str) -> int:
        """Of one token in one block. kv_cache_dtype: float32, float16, bfloat16 or int8."""
        scale_bytes = _KV_SCALE_BYTES * self.kv_vectors_per_slot if kv_cache_dtype == "int8" else 0
        return self.kv_elements_per_slot * _KV_ITEM_BYTES[kv_cache_dtype] + scale_bytes

    def count_adapter_bytes(self, rank: int, dtype: str | None) -> int:
        """Of a LoRA adapter on all projections. dtype: as of EngineArgs."""
        return self.lora_elements_per_rank * rank * (4 if dtype == "float32" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is left of the memory for the cache when sequences of `wanted_len` tokens are to be run.

    longest: up to wanted_len, the longest sequence that fits; less means that wanted_len does not
    """

    wanted_len: int
    longest: int
    max_num_seqs: int
    max_num_batched_tokens: int
    budget_bytes: int
    budget_note: str
    workspace_bytes: int
    num_blocks: int
    one_sequence_bytes: int
    smallest_pool_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Fits max_model_len and the pool to the memory, or says why what was typed cannot be.

    lora_bytes: kept free for LoRA adapters
    """

    args: EngineArgs
    facts: ModelFacts
    machine: Machine
    weights_bytes: int
    lora_bytes: int = 0
    block_size: int
    block_bytes: int

    def fit(self, max_positions: int) -> MemoryPlan:
        """The plan for the largest max_model_len, its `longest`."""
        args = self.args
        has_whole_prompts = args.enable_chunked_prefill is False
        if args.max_model_len is not None:
            plan = self._plan(args.max_model_len)
        else:
            wanted_len = min(self.facts.window, max_positions)
            if has_whole_prompts and args.max_num_batched_tokens is not None:
                wanted_len = min(wanted_len, max(args.max_num_batched_tokens, MIN_MAX_MODEL_LEN))
            plan = self._plan(wanted_len)
            if has_whole_prompts and plan.longest < wanted_len:
                # The step and its workspace grow with the length, so a shorter one leaves more to the cache.
                fits = _find_largest(wanted_len, lambda length: self._plan(length).longest == length)
                plan = self._plan(max(fits, MIN_MAX_MODEL_LEN))
        self._check(plan, has_whole_prompts)
        return plan

    def _plan(self, wanted_len: int) -> MemoryPlan:
        max_num_seqs, max_batched = self._resolve_batching(wanted_len)
        workspace = 4 * (max_batched * self.facts.row_elements + 2 * max_num_seqs * self.facts.vocab_size)
        workspace += _PROCESS_BYTES
        blocks_for = partial(
            blocks_for_sequence,
            kv_group_windows=self.facts.kv_group_windows,
            block_size=self.block_size,
            max_chunk=max_batched,
        )
        one_sequence = blocks_for(wanted_len) * self.block_bytes
        budget, note, pool = self._share_out(
            self.weights_bytes + self.lora_bytes + workspace, one_sequence, max_num_seqs
        )
        num_blocks = max(pool, 0) // self.block_bytes
        return MemoryPlan(
            wanted_len=wanted_len,
            longest=_find_largest(wanted_len, lambda length: blocks_for(length) <= num_blocks),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched,
            budget_bytes=budget,
            budget_note=note,
            workspace_bytes=workspace,
            num_blocks=num_blocks,
            one_sequence_bytes=one_sequence,
            smallest_pool_bytes=blocks_for(MIN_MAX_MODEL_LEN) * self.block_bytes,
        )

    def _resolve_batching(self, max_model_len: int) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens). Every running sequence must get its token in every step."""
        args = self.args
        batched = args.max_num_batched_tokens
        if batched is None:
            batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, args.max_num_seqs or 0)
            if args.enable_chunked_prefill is False:
                batched = max(batched, max_model_len)
        return args.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, batched), batched

    def _share_out(self, fixed_bytes: int, one_sequence_bytes: int, max_num_seqs: int) -> tuple[int, str, int]:
        """(budget, how it came about, the cache's part, negative when there is none)."""
        args, total = self.args, self.machine.total_bytes
        if args.kv_cache_memory_bytes is not None:
            return fixed_bytes + args.kv_cache_memory_bytes, "--kv-cache-memory-bytes", args.kv_cache_memory_bytes
        if args.gpu_memory_utilization is not None:
            budget = int(total * args.gpu_memory_utilization)
            return budget, f"{args.gpu_memory_utilization:g} of {format_bytes(total)}", budget - fixed_bytes
        usual = int(total * DEFAULT_CPU_MEMORY_UTILIZATION)
        ceiling = int(self.machine.available_bytes * _MAX_SHARE_OF_AVAILABLE)
        budget = min(max(usual, fixed_bytes + one_sequence_bytes), ceiling)
        if budget == ceiling:
            note = f"{_MAX_SHARE_OF_AVAILABLE:g} of the {format_bytes(self.machine.available_bytes)} that are free"
        elif budget == usual:
            note = f"half of {format_bytes(total)}"
        else:
            note = "what the weights and one full-length sequence need"
        cap = max(_DEFAULT_POOL_BYTES, total // 8, one_sequence_bytes)
        return budget, note, min(budget - fixed_bytes, max_num_seqs * one_sequence_bytes, cap)

    def _check(self, plan: MemoryPlan, has_whole_prompts: bool) -> None:
        args, total = self.args, self.machine.total_bytes
        fixed = self.weights_bytes + self.lora_bytes + plan.workspace_bytes
        if fixed + plan.smallest_pool_bytes > total:
            raise ConfigError(
                f"The model does not fit: {self._describe_fixed(plan)} need more than this machine's "
                f"{format_bytes(total)} of memory. Use a smaller or a more strongly quantized model, "
                "or a smaller --max-num-batched-tokens.",
                option="--model",
            )
        if args.kv_cache_memory_bytes is not None and plan.budget_bytes > total:
            refuse(
                "--kv-cache-memory-bytes",
                args.kv_cache_memory_bytes,
                f"with {self._describe_fixed(plan)} that is {format_bytes(plan.budget_bytes)} of "
                f"{format_bytes(total)} of memory; use at most {total - fixed}",
            )
        if plan.longest < MIN_MAX_MODEL_LEN:
            self._refuse_nothing_fits(plan)
        if plan.longest < plan.wanted_len and args.max_model_len is not None:
            refuse(
                "--max-model-len",
                args.max_model_len,
                f"one such sequence needs {format_bytes(plan.one_sequence_bytes)} of cache, and there are "
                f"{format_bytes(plan.num_blocks * self.block_bytes)} for it; use at most {plan.longest}, "
                + self._suggest_more_memory(fixed + plan.one_sequence_bytes, plan.one_sequence_bytes),
            )
        if has_whole_prompts and plan.max_num_batched_tokens < plan.longest:
            refuse(
                "--max-num-batched-tokens",
                plan.max_num_batched_tokens,
                f"without chunked prefill a prompt of up to max_model_len, {plan.longest} tokens, is one step; "
                f"use at least {plan.longest}, or --max-model-len {plan.max_num_batched_tokens}, "
                "or --enable-chunked-prefill",
            )

    def _describe_fixed(self, plan: MemoryPlan) -> str:
        lora = f", the LoRA adapters ({format_bytes(self.lora_bytes)})" if self.lora_bytes else ""
        return (
            f"the weights ({format_bytes(self.weights_bytes)}){lora} and the workspace "
            f"({format_bytes(plan.workspace_bytes)})"
        )

    def _suggest_more_memory(self, needed_bytes: int, cache_bytes: int) -> str:
        """The way out, as the end of a sentence, by the option that set the limit."""
        if self.args.kv_cache_memory_bytes is not None:
            return f"or --kv-cache-memory-bytes {cache_bytes}"
        share = _round_share_up(needed_bytes, self.machine.total_bytes)
        if share <= 1:
            return f"or --gpu-memory-utilization {share:g}"
        return "or a machine with more memory: all of this one's would not do"

    def _refuse_nothing_fits(self, plan: MemoryPlan) -> NoReturn:
        args, total, smallest_pool = self.args, self.machine.total_bytes, plan.smallest_pool_bytes
        if args.kv_cache_memory_bytes is not None:
            refuse(
                "--kv-cache-memory-bytes",
                args.kv_cache_memory_bytes,
                f"a sequence of {MIN_MAX_MODEL_LEN} tokens, the shortest that we start with, needs {smallest_pool}; "
                f"leave the option out, or give at least {smallest_pool}",
            )
        fixed = self.weights_bytes + self.lora_bytes + plan.workspace_bytes
        least, whole = (_round_share_up(fixed + pool, total) for pool in (smallest_pool, plan.one_sequence_bytes))
        sensible = f"; {whole:g} is enough for one sequence of {plan.wanted_len:,} tokens" if least < whole <= 1 else ""
        raise ConfigError(
            f"No memory is left for the KV cache: {self._describe_fixed(plan)} fill the "
            f"{format_bytes(plan.budget_bytes)} that we may use, {plan.budget_note}. "
            f"Use --gpu-memory-utilization {least:g} or more{sensible}. Or use a smaller --max-num-batched-tokens, or "
            "a smaller model.",
            option="--gpu-memory-utilization",
        )


def blocks_for_sequence(
    num_tokens: int, kv_group_windows: tuple[int | None, ...], block_size: int, max_chunk: int
) -> int:
    """The most blocks that one sequence holds on its way to `num_tokens`, over all groups.

    A group without a window keeps all blocks. With a window w, a chunk of n tokens needs its n positions and the w - 1
    before them. That run may begin inside a block, so m tokens touch up to ceil((m - 1) / block_size) + 1 blocks:

        |.......x|xxxxxxxx|xxxxxxxx|x.......|     m = w - 1 + n = 18, block_size = 8

    The KVCacheManager counts in the same way, so a max_model_len that we accept is never refused by the core.
    """
    whole = -(-num_tokens // block_size)
    total = 0
    for window in kv_group_windows:
        if window is None:
            total += whole
        else:
            touched = -(-(window - 2 + max_chunk) // block_size) + 1
            total += min(whole, touched)
    return total


def _find_largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, 0 for none; what is smaller than one that fits must fit too."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _round_share_up(part_bytes: int, total_bytes: int) -> float:
    """The smallest share of four decimals that gives at least so much, as it is multiplied out when it is typed."""
    share = math.ceil(10_000 * part_bytes / total_bytes)
    while int(total_bytes * (share / 10_000)) < part_bytes:
        share += 1
    return share / 10_000
