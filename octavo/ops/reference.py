"""The slow, obviously right backend: NumPy, float32 arrays, float64 sums. The truth in the tests of other backends.

Every row is computed by calls that see this row only, so batch invariance holds by construction: a matmul is one
matrix-vector product a row, attention is one softmax a row and head. Sums are float64 and rounded once to float32.

Imports NumPy and the interface only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    PenaltyRows,
    SampledRows,
    SamplingBatch,
    SublayerLora,
    WeightData,
)
from octavo.ops.sublayers import run_attention_sublayer, run_mlp_sublayer

# Rows of a weight that are widened to float64 at a time: 256 rows of a small model stay in the L2 cache.
_ROWS_AT_A_TIME = 256

_WEIGHT_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A weight [N, K] as plain float32, whatever it was. `dtype` names what its values are exact in."""

    values: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape  # type: ignore[return-value]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class ReferenceLora:
    """parts: (first output, down [r, K], up [num_outputs, r], scale), float32."""

    shape: tuple[int, int]
    parts: tuple[tuple[int, np.ndarray, np.ndarray, np.float32], ...]

    @property
    def num_bytes(self) -> int:
        return sum(down.nbytes + up.nbytes for _, down, up, _ in self.parts)


@dataclass(frozen=True, slots=True)
class ReferenceLayerCache:
    """keys, values: [num_blocks, block_size, num_kv_heads, head_dim], float16, float32, int8, or uint16:
                  the bits of bfloat16
    key_scales, value_scales: with int8, [num_blocks, block_size, num_kv_heads] float32
    """

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray | None = None
    value_scales: np.ndarray | None = None

    @property
    def arrays(self) -> list[np.ndarray]:
        """Those that there are; all begin with the block and the place in it."""
        each = (self.keys, self.values, self.key_scales, self.value_scales)
        return [array for array in each if array is not None]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class ReferenceOps:
    """See `octavo.ops.interface.Ops`, which states each method's promise."""

    name = "reference"

    # --- weights and caches, at load time ---------------------------------------------------------------------

    def pack_weight(self, parts: Sequence[WeightData], dtype: str = "auto") -> ReferenceWeight:
        if dtype not in _WEIGHT_DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; use one of {', '.join(_WEIGHT_DTYPES)}", option="--dtype")
        _check(len(parts) > 0, "pack_weight needs at least one part")
        for part in parts:
            _check(len(part.shape) == 2, f"a weight must be a matrix [N, K], not of shape {list(part.shape)}")
        widths = {part.shape[1] for part in parts}
        _check(len(widths) == 1, f"the parts of one weight must have one width K, not {sorted(widths)}")
        values = np.concatenate([_as_dtype(_to_float32(part), dtype) for part in parts])
        kinds = {_kind(part) if dtype == "auto" else dtype for part in parts}
        return ReferenceWeight(values, kinds.pop() if len(kinds) == 1 else "mixed")

    def pack_lora(self, parts: Sequence[LoraPart], num_outputs: int, num_inputs: int) -> ReferenceLora:
        packed, end = [], 0
        for part in sorted(parts, key=lambda part: part.first_output):
            rank, width = part.down.shape
            _check(
                width == num_inputs and part.up.shape[1] == rank and 1 <= rank <= MAX_LORA_RANK,
                f"an adapter of {list(part.down.shape)} and {list(part.up.shape)} does not fit {num_inputs} inputs",
            )
            _check(part.first_output >= end, f"two parts of an adapter add to output {part.first_output}")
            end = part.first_output + part.up.shape[0]
            _check(end <= num_outputs, f"an adapter adds to output {end - 1} of {num_outputs}")
            down, up = _to_float32(part.down), _to_float32(part.up)
            packed.append((part.first_output, down, up, np.float32(part.scale)))
        return ReferenceLora((num_outputs, num_inputs), tuple(packed))

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def choose_kv_cache_dtype(self, block_size: int, head_dim: int) -> str:
        return "float16"

    def allocate_layer_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> ReferenceLayerCache:
        if dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"the KV cache dtype is {dtype!r}; use one of {', '.join(KV_CACHE_DTYPES)}", option="--kv-cache-dtype"
            )
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        item = np.uint16 if dtype == "bfloat16" else dtype
        cache = ReferenceLayerCache(np.zeros(shape, item), np.zeros(shape, item))
        if dtype != "int8":
            return cache
        scales = np.zeros(shape[:3], np.float32)
        return ReferenceLayerCache(cache.keys, cache.values, scales, scales.copy())

    # --- the forward pass -------------------------------------------------------------------------------------

    def embedding(self, weight: ReferenceWeight, token_ids: np.ndarray, scale: float = 1.0) -> np.ndarray:
        num_rows = weight.shape[0]
        if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < num_rows):
            raise ShapeError(f"token ids {token_ids.min()} to {token_ids.max()} leave the embedding's {num_rows} rows")
        return weight.values[token_ids] * np.float32(scale)

    def linear(self, x: np.ndarray, weight: ReferenceWeight, bias: np.ndarray | None = None) -> np.ndarray:
        num_outputs, width = weight.shape
        _check(x.ndim == 2 and x.shape[1] == width, f"linear: x is {list(x.shape)}, the weight {[num_outputs, width]}")
        _check(bias is None or bias.shape == (num_outputs,), "linear: the bias must have one number an output")
        rows = x.astype(np.float64)
        out = np.empty((len(rows), num_outputs), np.float64)
        for start in range(0, num_outputs, _ROWS_AT_A_TIME):
            some = weight.values[start : start + _ROWS_AT_A_TIME].astype(np.float64)
            for index, row in enumerate(rows):
                # A product of all rows at once would let the BLAS choose another order of additions.
                out[index, start : start + len(some)] = some @ row
        if bias is not None:
            out += bias
        return _round(out)

    def lora_delta(
        self, x: np.ndarray, out: np.ndarray, rows: LoraRows, weights: Sequence[ReferenceLora | None]
    ) -> None:
        _check(len(weights) == len(rows.start) - 1, f"{len(weights)} adapters for {len(rows.start) - 1} groups")
        for group, weight in enumerate(weights):
            if weight is None:
                continue
            _check(
                (out.shape[1], x.shape[1]) == weight.shape and len(x) == len(out),
                f"lora_delta: x is {list(x.shape)}, out {list(out.shape)}, the adapter's weight {list(weight.shape)}",
            )
            for row in rows.rows[rows.start[group] : rows.start[group + 1]]:
                for first, down, up, scale in weight.parts:
                    inner = down.astype(np.float64) @ x[row].astype(np.float64) * scale
                    out[row, first : first + len(up)] += _round(up.astype(np.float64) @ inner)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        width = x.shape[-1]
        _check(weight.shape == (width,), f"rms_norm: x is {list(x.shape)}, the weight {list(weight.shape)}")
        rows = np.ascontiguousarray(x, np.float64).reshape(-1, width)
        mean_square = np.mean(rows * rows, axis=-1, keepdims=True)
        return _round(rows / np.sqrt(mean_square + eps) * weight).reshape(x.shape)

    def add_rms_norm(self, x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return self.rms_norm(self.add(x, residual), weight, eps)

    def add(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        _check(x.shape == residual.shape, f"add: x is {list(x.shape)}, the residual {list(residual.shape)}")
        residual += x
        return residual

    def rotary_embedding(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray) -> None:
        num_tokens = len(positions)
        _check(len(query) == len(key) == num_tokens, "rotary_embedding: query, key and positions differ in tokens")
        if num_tokens and not (positions.min() >= 0 and positions.max() < len(cos_sin)):
            raise ShapeError(f"rotary_embedding: a position leaves the table of {len(cos_sin)}")
        half = cos_sin.shape[1] // 2
        _check(2 * half <= query.shape[-1], "rotary_embedding: the table is wider than a head")
        cos = cos_sin[positions, None, :half].astype(np.float64)
        sin = cos_sin[positions, None, half:].astype(np.float64)
        for x in (query, key):
            first, second = x[..., :half].astype(np.float64), x[..., half : 2 * half].astype(np.float64)
            x[..., :half] = _round(first * cos - second * sin)
            x[..., half : 2 * half] = _round(second * cos + first * sin)

    def silu_and_mul(self, gate_up: np.ndarray) -> np.ndarray:
        gate, up = _halves(gate_up)
        with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is inf, and gate / inf is the right zero
            return _round(gate / (1.0 + np.exp(-gate)) * up)

    def gelu_and_mul(self, gate_up: np.ndarray) -> np.ndarray:
        gate, up = _halves(gate_up)
        inner = np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)
        return _round(0.5 * gate * (1.0 + np.tanh(inner)) * up)

    def write_kv(
        self, key: np.ndarray, value: np.ndarray, cache: ReferenceLayerCache, slot_mapping: np.ndarray
    ) -> None:
        _check(
            key.shape == value.shape and len(key) == len(slot_mapping) and key.shape[1:] == cache.keys.shape[2:],
            f"write_kv: key {list(key.shape)}, value {list(value.shape)}, {len(slot_mapping)} slots, "
            f"cache {list(cache.keys.shape)}",
        )
        num_slots = cache.keys.shape[0] * cache.keys.shape[1]
        written = slot_mapping >= 0
        _check(bool(np.all(slot_mapping < num_slots)), f"write_kv: a slot leaves the cache of {num_slots}")
        slots = slot_mapping[written]
        for vectors, stored, scales in (
            (key[written], cache.keys, cache.key_scales),
            (value[written], cache.values, cache.value_scales),
        ):
            if scales is not None:
                vectors, scale = quantize_vectors(mix_channels(vectors) if stored is cache.keys else vectors)
                scales.reshape(num_slots, -1)[slots] = scale
            if stored.dtype == np.uint16:
                vectors = (_as_dtype(vectors, "bfloat16").view(np.uint32) >> 16).astype(np.uint16)
            with np.errstate(over="ignore"):  # beyond float16: inf
                stored.reshape(num_slots, *key.shape[1:])[slots] = vectors

    def paged_attention(
        self,
        query: np.ndarray,
        cache: ReferenceLayerCache,
        attention: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> np.ndarray:
        num_kv_heads, head_dim = cache.keys.shape[2:]
        _check(
            query.ndim == 3 and query.shape[2] == head_dim and query.shape[1] % num_kv_heads == 0,
            f"paged_attention: query is {list(query.shape)}, the cache has {num_kv_heads} heads of {head_dim}",
        )
        _check(int(attention.query_start[-1]) == len(query), "paged_attention: query_start does not cover the query")
        out = np.zeros(query.shape, np.float64)
        for sequence, context_len in enumerate(attention.context_lens):
            start, end = attention.query_start[sequence : sequence + 2]
            first_position = int(context_len) - int(end - start)
            first_visible = max(0, first_position - sliding_window + 1) if sliding_window else 0
            keys, values = _gather(cache, attention.block_tables[sequence], first_visible, int(context_len))
            for row in range(start, end):
                position = first_position + int(row - start)
                first = max(0, position - sliding_window + 1) if sliding_window else 0
                seen = slice(first - first_visible, position + 1 - first_visible)
                out[row] = _attend(query[row], keys[:, seen], values[:, seen], scale, soft_cap)
        return _round(out)

    def attention_sublayer(
        self,
        sublayer: AttentionSublayer,
        residual: np.ndarray,
        positions: np.ndarray,
        attention: AttentionBatch,
        cache: ReferenceLayerCache,
        lora: SublayerLora | None = None,
    ) -> None:
        run_attention_sublayer(self, sublayer, residual, positions, attention, cache, lora)

    def mlp_sublayer(self, sublayer: MLPSublayer, residual: np.ndarray, lora: SublayerLora | None = None) -> None:
        run_mlp_sublayer(self, sublayer, residual, lora)

    def copy_blocks(self, caches: Sequence[ReferenceLayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        for cache in caches:
            for source, destination in pairs:
                for array in cache.arrays:
                    array[destination] = array[source]

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x[rows]

    def logits(
        self, residual: np.ndarray, rows: np.ndarray, norm: np.ndarray, eps: float, weight: ReferenceWeight
    ) -> np.ndarray:
        return self.linear(self.rms_norm(self.take_rows(residual, rows), norm, eps), weight)

    # --- after the forward pass -------------------------------------------------------------------------------

    def sample(self, logits: np.ndarray, batch: SamplingBatch) -> SampledRows:
        """As the interface says. top_p counts the probabilities that top_k left, renormalized; an infinite logit
        counts as a broken row, like a NaN."""
        num_rows = len(logits)
        _check(len(batch.temperature) == num_rows, f"sample: {num_rows} rows, {len(batch.temperature)} temperatures")
        width = max(0, int(batch.num_logprobs.max(initial=0)))
        result = SampledRows(
            token_ids=np.full(num_rows, -1, np.int32),
            logprobs=np.zeros(num_rows, np.float32),
            top_ids=np.full((num_rows, width), -1, np.int32),
            top_logprobs=np.zeros((num_rows, width), np.float32),
        )
        is_broken = [bool(np.isnan(row).any() or np.isposinf(row).any()) for row in logits]
        raw_logprobs: dict[int, np.ndarray] = {}
        for row in range(num_rows):
            if batch.num_logprobs[row] >= 0 and not is_broken[row] and np.isfinite(logits[row]).any():
                raw_logprobs[row] = _log_softmax(logits[row])
        if batch.banned is not None:
            logits[batch.banned[0], batch.banned[1]] = -np.inf
        if batch.allowed is not None:
            _apply_masks(logits, *batch.allowed)
        if batch.penalties is not None:
            _apply_penalties(logits, batch.penalties)
        if batch.bias is not None:
            rows, token_ids, values = batch.bias
            np.add.at(logits, (rows, token_ids), values)
        for row in range(num_rows):
            if is_broken[row] or not np.isfinite(logits[row]).any():
                continue
            token_id = _draw(
                logits[row],
                float(batch.temperature[row]),
                int(batch.top_k[row]),
                float(batch.top_p[row]),
                float(batch.min_p[row]),
                float(batch.random[row]),
            )
            result.token_ids[row] = token_id
            if row in raw_logprobs:
                logprobs = raw_logprobs[row]
                best = np.argsort(-logprobs, kind="stable")[: batch.num_logprobs[row]]
                result.logprobs[row] = logprobs[token_id]
                result.top_ids[row, : len(best)] = best
                result.top_logprobs[row, : len(best)] = logprobs[best]
        return result


def _hadamard_size(head_dim: int) -> int:
    return head_dim & -head_dim


def mix_channels(x: np.ndarray) -> np.ndarray:
    """x [..., head_dim] -> its Hadamard transform over runs of the largest power of two that divides head_dim."""
    step = 1
    while step < _hadamard_size(x.shape[-1]):
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        step *= 2
    return x


def quantize_vectors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., head_dim] float32 -> (codes int8, scales [...] float32), as `Ops.allocate_layer_cache` says."""
    largest = np.abs(x).max(axis=-1).astype(np.float32)
    is_finite = np.isfinite(largest)  # the largest of a NaN and others is a NaN
    has_codes = is_finite & (largest >= np.float32(1e-35))
    divisor = np.where(has_codes, largest, np.float32(1))
    codes = np.rint(np.where(has_codes[..., None], x, np.float32(0)) * (np.float32(127) / divisor)[..., None])
    scale = np.where(has_codes, divisor / np.float32(127), np.where(is_finite, np.float32(0), np.float32(np.nan)))
    return codes.astype(np.int8), scale.astype(np.float32)


def _check(fits: bool, message: str) -> None:
    if not fits:
        raise ShapeError(message)


def _round(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _to_float32(part: WeightData) -> np.ndarray:
    if isinstance(part, GroupQuantized):
        return part.dequantize()
    if isinstance(part, BFloat16):
        return part.to_float32()
    return part.astype(np.float32)


def _as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to what `dtype` can hold."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
        return np.where(np.isnan(values), values, rounded.astype(np.uint32).view(np.float32))
    return values


def _kind(part: WeightData) -> str:
    if isinstance(part, GroupQuantized):
        return f"q{part.bits}"
    if isinstance(part, BFloat16):
        return "bfloat16"
    return str(part.dtype)


def _halves(gate_up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T, 2 * I] -> gate and up, [T, I] float64 each."""
    _check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, f"gate_up is {list(gate_up.shape)}, not [T, 2 * I]")
    half = gate_up.shape[1] // 2
    return gate_up[:, :half].astype(np.float64), gate_up[:, half:].astype(np.float64)


def _gather(cache: ReferenceLayerCache, block_table: np.ndarray, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values at positions [first, end): [num_kv_heads, end - first, head_dim] float64."""
    block_size = cache.keys.shape[1]
    positions = np.arange(first, end)
    _check(end <= len(block_table) * block_size, f"paged_attention: {end} tokens in {len(block_table)} blocks")
    blocks = np.asarray(block_table)[positions // block_size]
    _check(bool(np.all(blocks >= 0)), "paged_attention: a visible position has no block")
    keys = _to_float64(cache.keys[blocks, positions % block_size])
    values = _to_float64(cache.values[blocks, positions % block_size])
    if cache.key_scales is not None and cache.value_scales is not None:
        keys *= cache.key_scales[blocks, positions % block_size, :, None]
        keys = mix_channels(keys) / _hadamard_size(keys.shape[-1])  # twice is that many times the key
        values *= cache.value_scales[blocks, positions % block_size, :, None]
    return np.ascontiguousarray(keys.swapaxes(0, 1)), np.ascontiguousarray(values.swapaxes(0, 1))


def _to_float64(stored: np.ndarray) -> np.ndarray:
    """What the items of a cache mean, but for scales."""
    if stored.dtype == np.uint16:
        stored = BFloat16(stored).to_float32()
    return stored.astype(np.float64)


def _attend(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, soft_cap: float | None
) -> np.ndarray:
    """One row: query [num_heads, head_dim]; keys, values [num_kv_heads, seen, head_dim] -> [num_heads, head_dim]."""
    num_heads, head_dim = query.shape
    num_kv_heads = len(keys)
    heads_per_key = num_heads // num_kv_heads
    out = np.empty((num_heads, head_dim), np.float64)
    for head in range(num_heads):
        scores = keys[head // heads_per_key] @ query[head].astype(np.float64) * scale
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[head // heads_per_key] / weights.sum()
    return out


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row.astype(np.float64) - float(row.max())
    return shifted - np.log(np.exp(shifted).sum())


def _apply_masks(logits: np.ndarray, rows: np.ndarray, masks: np.ndarray) -> None:
    num_words = -(-logits.shape[1] // 32)
    _check(masks.shape == (len(rows), num_words), f"masks are {list(masks.shape)}, not [{len(rows)}, {num_words}]")
    for row, mask in zip(rows, masks, strict=True):
        bits = np.arange(32, dtype=np.uint32)
        is_allowed = (mask.view(np.uint32)[:, None] >> bits & 1).astype(bool).reshape(-1)
        logits[row, ~is_allowed[: logits.shape[1]]] = -np.inf


def _apply_penalties(logits: np.ndarray, penalties: PenaltyRows) -> None:
    for index, row in enumerate(penalties.rows):
        listed = slice(penalties.start[index], penalties.start[index + 1])
        token_ids = penalties.token_ids[listed]
        counts = penalties.output_counts[listed].astype(np.float32)
        values = logits[row, token_ids]
        repetition = penalties.repetition[index]
        values = np.where(values > 0, values / repetition, values * repetition)
        values = values - penalties.frequency[index] * counts - penalties.presence[index] * (counts > 0)
        logits[row, token_ids] = values


def _draw(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, random: float) -> int:
    """A token id of a row [vocab_size] that has at least one finite logit and none that is NaN or +inf."""
    if temperature == 0:
        return int(np.argmax(row))
    order = np.argsort(-row, kind="stable")  # best first, ties by lower id
    if 0 < top_k < len(order):
        order = order[:top_k]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to exp(-inf) = 0
        weights = np.exp((row[order].astype(np.float64) - float(row[order[0]])) / temperature)
    if top_p < 1:
        running = np.cumsum(weights)
        num_kept = int(np.searchsorted(running, top_p * running[-1], side="left")) + 1
        order, weights = order[:num_kept], weights[:num_kept]
    kept = weights >= min_p * weights[0]
    by_id = np.argsort(order[kept])
    running = np.cumsum(weights[kept][by_id])
    index = int(np.searchsorted(running, random * running[-1], side="right"))
    return int(order[kept][by_id][min(index, len(running) - 1)])
