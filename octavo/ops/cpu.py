"""The CPU backend: NumPy arrays, and our C++ kernels (csrc/cpu) behind `octavo._cpu`.

Each method hands its arrays on; shapes, dtypes and indexes are checked by the binding. Which instruction set the
kernels use is chosen when a CpuOps is made: the best this machine has, or what OCTAVO_ISA says.

Quantized weights quantize the activations too: to 8 bits, with a scale and a middle for each row and group of 32. KV
memory has a layout of its own, which only the kernels know.

Imports NumPy, the interface and `octavo._cpu` only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo import _cpu
from octavo.errors import ConfigError, ShapeError
from octavo.ops.interface import (
    KV_CACHE_DTYPES,
    MAX_LORA_RANK,
    AttentionBatch,
    AttentionSublayer,
    BFloat16,
    GroupQuantized,
    LoraPart,
    LoraRows,
    MLPSublayer,
    SampledRows,
    SamplingBatch,
    SublayerLora,
    WeightData,
)

ISA_VARIABLE = "OCTAVO_ISA"
KNOWN_ISAS = ("scalar", "avx2", "avx512vnni", "amx", "neon", "neondot")  # docs/instruction-sets.md
_WEIGHT_DTYPES = ("auto", "float32", "float16", "bfloat16")


def runnable_isas() -> list[str]:
    """The kernel variants this machine can run, best first; "scalar" is always among them."""
    return list(_cpu.runnable_isas())


def choose_isa(wanted: str | None = None) -> str:
    """`wanted`, else what OCTAVO_ISA says, else the best. Raises ConfigError for one that cannot run here."""
    wanted = wanted or os.environ.get(ISA_VARIABLE) or None
    runnable = runnable_isas()
    if wanted is None:
        return runnable[0]
    if wanted not in runnable:
        reason = "this machine cannot run it" if wanted in KNOWN_ISAS else "there is no such variant"
        raise ConfigError(
            f"{ISA_VARIABLE} is {wanted!r}, but {reason}; use one of {', '.join(runnable)}, or leave it out"
        )
    return wanted


def count_cores(cpu_root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores in this process's affinity mask: two hyper-threads share the units that a kernel keeps busy."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        try:
            cores.add((cpu_root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


class CpuOps:
    """See `octavo.ops.interface.Ops`, which states each method's promise.

    isa:         one of KNOWN_ISAS; None takes OCTAVO_ISA or the best
    num_threads: size of this instance's thread pool, the caller included; None takes the physical cores
    """

    name = "cpu"

    def __init__(self, isa: str | None = None, num_threads: int | None = None):
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"threads is {num_threads}, but at least 1 is needed", option="--threads")
        self.isa = choose_isa(isa)
        self.num_threads = count_cores() if num_threads is None else num_threads
        self._engine = _cpu.Engine(self.isa, self.num_threads)

    # --- weights and caches, at load time ---------------------------------------------------------------------

    def pack_weight(self, parts: Sequence[WeightData], dtype: str = "auto") -> Any:
        if dtype not in _WEIGHT_DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; use one of {', '.join(_WEIGHT_DTYPES)}", option="--dtype")
        if not parts:
            raise ShapeError("pack_weight needs at least one part")
        return self._engine.pack_weight([_describe(part) for part in parts], dtype)

    def pack_lora(self, parts: Sequence[LoraPart], num_outputs: int, num_inputs: int) -> Any:
        described = []
        for part in parts:
            kind, down = _describe(part.down)[:2]
            up_kind, up = _describe(part.up)[:2]
            if up_kind != kind:
                raise ShapeError(f"an adapter's matrices are {kind} and {up_kind}; they must be of one kind")
            described.append((part.first_output, kind, down, up, part.scale))
        return _cpu.pack_lora(described, num_outputs, num_inputs, MAX_LORA_RANK)

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def choose_kv_cache_dtype(self, block_size: int, head_dim: int) -> str:
        is_tiled = self.isa == "amx" and block_size == 16 and head_dim % 32 == 0
        return "bfloat16" if is_tiled else "float16"

    def allocate_layer_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> Any:
        """A block_size that is not a multiple of 16 pads the keys to one."""
        if dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"the KV cache dtype is {dtype!r}; use one of {', '.join(KV_CACHE_DTYPES)}", option="--kv-cache-dtype"
            )
        return _cpu.make_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)

    # --- the forward pass -------------------------------------------------------------------------------------

    def embedding(self, weight: Any, token_ids: np.ndarray, scale: float = 1.0) -> np.ndarray:
        return self._engine.embedding(weight, token_ids, scale)

    def linear(self, x: np.ndarray, weight: Any, bias: np.ndarray | None = None) -> np.ndarray:
        return self._engine.linear(x, weight, bias)

    def lora_delta(self, x: np.ndarray, out: np.ndarray, rows: LoraRows, weights: Sequence[Any]) -> None:
        self._engine.lora_delta(x, out, _bind_rows(rows), _cpu.LoraWeights(weights))

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        out = np.empty(x.shape, np.float32)
        if x.ndim == 2:
            self._engine.rms_norm(x, None, weight, eps, out)
        else:
            self._engine.rms_norm(_rows(x), None, weight, eps, _rows(out))
        return out

    def add_rms_norm(self, x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        out = np.empty(x.shape, np.float32)
        if x.ndim == 2:
            self._engine.rms_norm(x, residual, weight, eps, out)
        else:
            self._engine.rms_norm(_rows(x), _rows_in_place(residual), weight, eps, _rows(out))
        return out

    def add(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        if x.ndim == 2:
            self._engine.rms_norm(x, residual, None, 0.0, None)
        else:
            self._engine.rms_norm(_rows(x), _rows_in_place(residual), None, 0.0, None)
        return residual

    def rotary_embedding(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray) -> None:
        self._engine.rotary(query, key, positions, cos_sin)

    def silu_and_mul(self, gate_up: np.ndarray) -> np.ndarray:
        return self._engine.silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: np.ndarray) -> np.ndarray:
        return self._engine.gelu_and_mul(gate_up)

    def write_kv(self, key: np.ndarray, value: np.ndarray, cache: Any, slot_mapping: np.ndarray) -> None:
        self._engine.write_kv(key, value, cache, slot_mapping)

    def paged_attention(
        self,
        query: np.ndarray,
        cache: Any,
        attention: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> np.ndarray:
        return self._engine.paged_attention(
            query,
            cache,
            attention.query_start,
            attention.context_lens,
            attention.block_tables,
            scale,
            sliding_window or 0,
            soft_cap or 0.0,
        )

    def attention_sublayer(
        self,
        sublayer: AttentionSublayer,
        residual: np.ndarray,
        positions: np.ndarray,
        attention: AttentionBatch,
        cache: Any,
        lora: SublayerLora | None = None,
    ) -> None:
        """`attention` and `positions` are checked at the first call with them, a group's layers share the result."""
        if attention.native is None:
            attention.native = _cpu.StepRows(
                positions,
                attention.query_start,
                attention.context_lens,
                attention.block_tables,
                attention.slot_mapping,
            )
        if sublayer.native is None:
            sublayer.native = _bind_attention(sublayer)
        rows, weights = (None, None) if lora is None else _bind_lora(lora)
        self._engine.attention_sublayer(sublayer.native, residual, attention.native, cache, rows, weights)

    def mlp_sublayer(self, sublayer: MLPSublayer, residual: np.ndarray, lora: SublayerLora | None = None) -> None:
        if sublayer.native is None:
            sublayer.native = _bind_mlp(sublayer)
        rows, weights = (None, None) if lora is None else _bind_lora(lora)
        self._engine.mlp_sublayer(sublayer.native, residual, rows, weights)

    def copy_blocks(self, caches: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
        for cache in caches:
            cache.copy_blocks(pairs)

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self._engine.take_rows(x, rows)

    def logits(self, residual: np.ndarray, rows: np.ndarray, norm: np.ndarray, eps: float, weight: Any) -> np.ndarray:
        return self._engine.logits(residual, rows, norm, eps, weight)

    # --- after the forward pass -------------------------------------------------------------------------------

    def sample(self, logits: np.ndarray, batch: SamplingBatch) -> SampledRows:
        """As the interface says. top_p counts the probabilities that top_k left, renormalized; an infinite logit
        counts as a broken row, like a NaN. Probabilities are float32, their sums float64."""
        penalties = batch.penalties
        token_ids, logprobs, top_ids, top_logprobs = self._engine.sample(
            logits,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.random,
            batch.num_logprobs,
            None
            if penalties is None
            else (
                penalties.rows,
                penalties.start,
                penalties.token_ids,
                penalties.output_counts,
                penalties.presence,
                penalties.frequency,
                penalties.repetition,
            ),
            batch.banned,
            batch.allowed,
            batch.bias,
        )
        return SampledRows(token_ids=token_ids, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def _describe(part: WeightData) -> tuple[str, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """What the binding takes: kind, values or codes, scale, minimum."""
    if isinstance(part, GroupQuantized):
        minimum = None if part.minimum is None else np.ascontiguousarray(part.minimum)
        return f"q{part.bits}", np.ascontiguousarray(part.codes), np.ascontiguousarray(part.scale), minimum
    if isinstance(part, BFloat16):
        return "bfloat16", np.ascontiguousarray(part.bits), None, None
    if part.dtype.name not in ("float32", "float16"):
        raise ShapeError(f"a weight of {part.dtype} cannot be packed; use float32, float16, BFloat16 or GroupQuantized")
    return part.dtype.name, np.ascontiguousarray(part), None, None


def _bind_attention(sublayer: AttentionSublayer) -> Any:
    """Checks the parameters once; holds on to them."""
    return _cpu.AttentionSublayer(
        norm=sublayer.norm,
        eps=sublayer.eps,
        qkv=sublayer.qkv,
        qkv_bias=sublayer.qkv_bias,
        query_norm=sublayer.query_norm,
        key_norm=sublayer.key_norm,
        cos_sin=sublayer.rotary,
        num_heads=sublayer.num_heads,
        num_kv_heads=sublayer.num_kv_heads,
        head_dim=sublayer.head_dim,
        scale=sublayer.scale,
        window=sublayer.sliding_window or 0,
        soft_cap=sublayer.soft_cap or 0.0,
        output=sublayer.output,
        output_bias=sublayer.output_bias,
        output_norm=sublayer.output_norm,
    )


def _bind_mlp(sublayer: MLPSublayer) -> Any:
    return _cpu.MlpSublayer(
        norm=sublayer.norm,
        eps=sublayer.eps,
        gate_up=sublayer.gate_up,
        gate_up_bias=sublayer.gate_up_bias,
        is_gelu=sublayer.is_gelu,
        down=sublayer.down,
        down_bias=sublayer.down_bias,
        output_norm=sublayer.output_norm,
    )


def _bind_rows(rows: LoraRows) -> Any:
    if rows.native is None:
        rows.native = _cpu.LoraRows(rows.rows, rows.start)
    return rows.native


def _bind_lora(lora: SublayerLora) -> tuple[Any, Any]:
    """What all layers of a step share, and what the layer keeps from step to step."""
    if lora.native is None:
        lora.native = _cpu.LoraPair(lora.first, lora.second)
    return _bind_rows(lora.rows), lora.native


def _rows(x: np.ndarray) -> np.ndarray:
    """The same values as [rows, last axis]; a copy where the strides allow no view."""
    return x.reshape(-1, x.shape[-1])


def _rows_in_place(x: np.ndarray) -> np.ndarray:
    if not x.flags.c_contiguous:
        raise ShapeError("the residual must be contiguous")
    return _rows(x)
