"""The whole device contract: what a backend must offer to the models, stated once.

Backends: `reference` (NumPy, float32, obviously right), `cpu` (NumPy arrays and our C++ kernels); later `cuda`.
An array below is whatever the backend's arrays are; models pass them on and may slice and reshape them, no more.
Activations are float32 on reference and cpu.

Batch invariance is part of the contract: one row's result may depend on the shapes of the weights, on that row's own
input and on its own sequence's context, and on nothing else - not on how many other rows are in the call, on how the
prompt was cut into chunks, on the numbers of the blocks, or on the number of threads. Bit for bit.

Imports NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Array = Any  # the backend's array type
Weight = Any  # a backend's packed weight matrix, made by `pack_weight`
LayerCache = Any  # a backend's key and value memory of one layer, made by `allocate_layer_cache`
LoraWeight = Any  # a backend's form of what one adapter adds to one weight, made by `pack_lora`

QUANT_GROUP_SIZE = 32

KV_CACHE_DTYPES = ("float16", "bfloat16", "float32", "int8")


@dataclass(frozen=True, slots=True)
class GroupQuantized:
    """A weight matrix [N, K] in integer codes: w[n, k] = scale[n, k // 32] * codes[n, k] + minimum[n, k // 32].

    codes:   [N, K] uint8 for bits 4 (0 to 15); int8 for bits 8 (-128 to 127)
    scale:   [N, K / 32] float32
    minimum: [N, K / 32] float32, or None for zero
    bits:    4 or 8
    """

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape  # type: ignore[return-value]

    def dequantize(self) -> np.ndarray:
        """[N, K] float32; the exact meaning of the codes."""
        num_rows, num_columns = self.codes.shape
        grouped = self.codes.astype(np.float32).reshape(num_rows, -1, QUANT_GROUP_SIZE) * self.scale[:, :, None]
        if self.minimum is not None:
            grouped += self.minimum[:, :, None]
        return grouped.reshape(num_rows, num_columns)


@dataclass(frozen=True, slots=True)
class BFloat16:
    """A bfloat16 array, which NumPy does not have: `bits` is uint16, the upper half of the float32."""

    bits: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def to_float32(self) -> np.ndarray:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


# One tensor of a checkpoint as `weights` hands it over: float32 or float16 arrays as they are.
WeightData = np.ndarray | GroupQuantized | BFloat16


# A rank above this would not fit the kernels' registers of partial sums.
MAX_LORA_RANK = 512


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What an adapter adds to some neighbouring outputs of a weight: scale * up(down(x)). Hu et al. 2021.

    first_output: of the weight's outputs, the first that it adds to
    down:         [r, K] float32, float16 or BFloat16, `lora_A`; r is at most MAX_LORA_RANK
    up:           [num_outputs, r], of the same kind, `lora_B`
    """

    first_output: int
    down: np.ndarray | BFloat16
    up: np.ndarray | BFloat16
    scale: float


@dataclass(slots=True)
class LoraRows:
    """Which rows of a step have an adapter. Those of group g, which share one, are rows[start[g]:start[g + 1]].

    rows:   [R] int32, ascending in each group; no row is in two groups
    start:  [num_groups + 1] int32
    native: what a backend made of it at its first use, the backend's own: the arrays must not change any more
    """

    rows: Array
    start: Array
    native: Any = field(default=None, repr=False, compare=False)


@dataclass(slots=True, eq=False)
class SublayerLora:
    """What the adapters of a step add to the two projections of a sublayer.

    rows:   of the step
    first:  one a group of `rows`, of qkv or gate_up; None where the adapter leaves it alone
    second: one a group, of the output or of down
    native: what a backend made of first and second at their first use, the backend's own
    """

    rows: LoraRows
    first: Sequence[LoraWeight | None]
    second: Sequence[LoraWeight | None]
    native: Any = field(default=None, repr=False)


@dataclass(slots=True)
class AttentionBatch:
    """Where the tokens of one step live, for one KV cache group.

    query_start:  [num_seqs + 1] int32; the rows of sequence s are [query_start[s], query_start[s + 1])
    context_lens: [num_seqs] int32; tokens in the cache once this step's are written. Row i of sequence s has the
                  position context_lens[s] - num_rows(s) + i and sees the positions up to and including its own
                  (with a sliding window w: the last w of them, its own included)
    block_tables: [num_seqs, max_blocks] int32; -1 where there is no block, or where a window let it go
    slot_mapping: [num_tokens] int64; block_id * block_size + offset of each row, -1 for a row that is not written
    native:       what a backend made of it at its first use, the backend's own: the arrays must not change any more
    """

    query_start: Array
    context_lens: Array
    block_tables: Array
    slot_mapping: Array
    native: Any = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class ForwardBatch:
    """What `model(ops, batch, kv_cache)` reads. All rows of all scheduled sequences, flat, in order.

    token_ids:   [num_tokens] int32
    positions:   [num_tokens] int32
    attention:   one AttentionBatch a KV cache group
    layer_group: for each layer, the index of its group
    logits_rows: [num_logits] int32; the rows whose logits are wanted
    """

    token_ids: Array
    positions: Array
    attention: list[AttentionBatch]
    layer_group: Sequence[int]
    logits_rows: Array


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionSublayer:
    """The parameters of `Ops.attention_sublayer`; None where the model has none.

    norm:        [H], of the input
    qkv:         weight [(num_heads + 2 * num_kv_heads) * head_dim, H]: queries, keys and values side by side
    query_norm, key_norm: [head_dim], of each head
    rotary:      [max_positions, rotary_dim], as of `rotary_embedding`
    output:      weight [H, num_heads * head_dim]
    output_norm: [H], of what is added to the residual
    eps:         of all norms
    scale, sliding_window, soft_cap: as of `paged_attention`
    native:      what a backend made of it at its first use, the backend's own
    """

    norm: Array
    eps: float
    qkv: Weight
    qkv_bias: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None
    rotary: Array
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    output: Weight
    output_bias: Array | None = None
    output_norm: Array | None = None
    native: Any = field(default=None, repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class MLPSublayer:
    """The parameters of `Ops.mlp_sublayer`; None where the model has none.

    norm:        [H], of the input
    gate_up:     weight [2 * I, H], the gate in the first half
    down:        weight [H, I]
    output_norm: [H], of what is added to the residual
    eps:         of both norms
    is_gelu:     gated by GELU (its tanh approximation), else by SiLU
    native:      what a backend made of it at its first use, the backend's own
    """

    norm: Array
    eps: float
    gate_up: Weight
    gate_up_bias: Array | None = None
    is_gelu: bool
    down: Weight
    down_bias: Array | None = None
    output_norm: Array | None = None
    native: Any = field(default=None, repr=False)


@dataclass(slots=True)
class PenaltyRows:
    """Penalties of the few rows that have any, in compressed rows: row rows[i] has the tokens
    token_ids[start[i]:start[i + 1]] (each once), with the number of times it was generated.

    rows:          [P] int32, indexes into the logits
    start:         [P + 1] int32
    token_ids:     [start[P]] int32, the distinct tokens of prompt and generation
    output_counts: [start[P]] int32, 0 for a token that is in the prompt only
    presence, frequency, repetition: [P] float32
    """

    rows: Array
    start: Array
    token_ids: Array
    output_counts: Array
    presence: Array
    frequency: Array
    repetition: Array


@dataclass(slots=True)
class SamplingBatch:
    """How to sample each of R rows of logits.

    temperature:  [R] float32; 0 is greedy (the lowest id among equals)
    top_k:        [R] int32; 0 is off
    top_p, min_p: [R] float32; 1 and 0 are off
    random:       [R] float64, uniform in [0, 1), made by the executor from (seed, position)
    num_logprobs: [R] int32; -1 for none, else the number of best alternatives wanted
    penalties:    None when no row has any
    banned:       None, or (rows [B] int32, token_ids [B] int32): pairs that must not be sampled
    allowed:      None, or (rows [G] int32, masks [G, ceil(vocab_size / 32)] int32): in those rows only the
                  tokens whose bit (id % 32) of word (id // 32) is set may be sampled; bits beyond the vocabulary are
                  ignored
    bias:         None, or (rows [B] int32, token_ids [B] int32, values [B] float32), added to the logits
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    random: Array
    num_logprobs: Array
    penalties: PenaltyRows | None = None
    banned: tuple[Array, Array] | None = None
    allowed: tuple[Array, Array] | None = None
    bias: tuple[Array, Array, Array] | None = None


@dataclass(slots=True)
class SampledRows:
    """token_ids:    [R] int32
    logprobs:     [R] float32, of the sampled token, from the raw logits; 0 where num_logprobs is -1
    top_ids:      [R, max(num_logprobs)] int32, best first, ties by lower id; -1 beyond a row's own number
    top_logprobs: [R, max(num_logprobs)] float32
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Ops(Protocol):
    """A backend. Raises ShapeError when arrays do not fit together."""

    name: str

    # --- weights and caches, at load time ---------------------------------------------------------------------

    def pack_weight(self, parts: Sequence[WeightData], dtype: str = "auto") -> Weight:
        """Pack the matrices [N_i, K] into one weight [sum N_i, K] whose outputs lie side by side.

        dtype: "auto" keeps what the checkpoint has (4- or 8-bit codes, float16, bfloat16, float32);
               "float32", "float16", "bfloat16" convert. Parts may be of different kinds.
        A packed weight has .shape (N, K), .num_bytes and .dtype ("q4", "q8", "float32", ... or "mixed").
        """
        ...

    def pack_lora(self, parts: Sequence[LoraPart], num_outputs: int, num_inputs: int) -> LoraWeight:
        """What one adapter adds to a weight [num_outputs, num_inputs]; the parts' outputs do not overlap.

        Has .num_bytes. Values are kept in the dtype they come in.
        """
        ...

    def to_device(self, array: np.ndarray) -> Array:
        """Vectors and tables (norm weights, biases, rotary tables, index arrays), kept in their dtype."""
        ...

    def choose_kv_cache_dtype(self, block_size: int, head_dim: int) -> str:
        """ "float16" or "bfloat16": in which of the two its attention is faster."""
        ...

    def allocate_layer_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> LayerCache:
        """One layer's keys and values for every block of the pool; dtype one of KV_CACHE_DTYPES.

        bfloat16: attention may round its queries, scale included, and its weights to bfloat16 as well.
        int8: each token's key and value of each head in codes -127 to 127 with a float32 scale, from that vector's own
        numbers only, in float32 arithmetic: scale = max |x| / 127, code = x * (127 / max |x|) to nearest, ties to even.
        Below 1e-35 all of it is zero; a NaN or an infinity makes the scale a NaN. Of a key, x is its Hadamard transform
        (unscaled, near neighbours mixed first) over runs of the largest power of two that divides head_dim.
        Memory is committed by the operating system as blocks are first written. Has .num_bytes.
        """
        ...

    # --- the forward pass -------------------------------------------------------------------------------------

    def embedding(self, weight: Weight, token_ids: Array, scale: float = 1.0) -> Array:
        """[num_tokens] int32 -> [num_tokens, K] float32, each row of the weight times `scale`."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """x [num_tokens, K] @ weight^T (+ bias [N]) -> [num_tokens, N]. Quantized weights may quantize x per row and
        group of 32 to 8 bits."""
        ...

    def lora_delta(self, x: Array, out: Array, rows: LoraRows, weights: Sequence[LoraWeight | None]) -> None:
        """out[r] += scale * up(down(x[r])), in place, for the rows of each group and the parts of its weight.

        x [num_tokens, K], out [num_tokens, N] contiguous; one weight a group, None adds nothing. Other rows are not
        touched. A row's bits do not depend on the rows, the groups or the ranks beside it.
        """
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis; any leading shape. weight [H] is the full factor
        (a model whose checkpoint stores w - 1 adds the 1 at load). Zhang and Sennrich 2019."""
        ...

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> Array:
        """residual += x, in place; returns rms_norm(residual)."""
        ...

    def add(self, x: Array, residual: Array) -> Array:
        """residual += x, in place; returns residual."""
        ...

    def rotary_embedding(self, query: Array, key: Array, positions: Array, cos_sin: Array) -> None:
        """Rotate in place. query [T, num_heads, head_dim], key [T, num_kv_heads, head_dim], rows may be strided views
        (contiguous in the last two axes). cos_sin [max_positions, rotary_dim] float32: cosines in the first half,
        sines in the second. Dimension i pairs with i + rotary_dim / 2 (the Hugging Face layout). Su et al. 2021."""
        ...

    def silu_and_mul(self, gate_up: Array) -> Array:
        """[T, 2 * I] -> [T, I]: silu(gate) * up, gate in the first half."""
        ...

    def gelu_and_mul(self, gate_up: Array) -> Array:
        """[T, 2 * I] -> [T, I]: gelu_tanh(gate) * up (the tanh approximation)."""
        ...

    def write_kv(self, key: Array, value: Array, cache: LayerCache, slot_mapping: Array) -> None:
        """Store keys and values [T, num_kv_heads, head_dim] at their slots, in place; -1 skips the row.
        Kwon et al. 2023, section 4."""
        ...

    def paged_attention(
        self,
        query: Array,
        cache: LayerCache,
        attention: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Array:
        """Causal attention of query [T, num_heads, head_dim] over the cache -> [T, num_heads, head_dim].

        Prefill chunks and single decode rows are mixed freely. Query head h reads key head
        h // (num_heads / num_kv_heads). soft_cap c: scores become c * tanh(score / c)."""
        ...

    def attention_sublayer(
        self,
        sublayer: AttentionSublayer,
        residual: Array,
        positions: Array,
        attention: AttentionBatch,
        cache: LayerCache,
        lora: SublayerLora | None = None,
    ) -> None:
        """residual [T, H] += attention over its norm, in place; writes the keys and values of its rows to the cache.
        The same bits as the single ops give in the order of `octavo.ops.sublayers`; a row without adapter has the
        bits it has without `lora`."""
        ...

    def mlp_sublayer(self, sublayer: MLPSublayer, residual: Array, lora: SublayerLora | None = None) -> None:
        """residual [T, H] += down(activation(gate) * up) of its norm, in place. Bits as of attention_sublayer."""
        ...

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer's cache, in the order given."""
        ...

    def take_rows(self, x: Array, rows: Array) -> Array:
        """x[rows] as a new array; rows [R] int32."""
        ...

    def logits(self, residual: Array, rows: Array, norm: Array, eps: float, weight: Weight) -> Array:
        """linear(rms_norm(take_rows(residual, rows), norm, eps), weight): [R, N], of these rows and of no other."""
        ...

    # --- after the forward pass -------------------------------------------------------------------------------

    def sample(self, logits: Array, batch: SamplingBatch) -> SampledRows:
        """One token for each row of logits [R, vocab_size] float32, which are changed in place.

        In this order: log-probabilities of the raw row where wanted; banned and not allowed tokens; repetition penalty
        (positive logits divided, negative multiplied), frequency and presence penalty; bias; temperature; top-k; top-p
        (the smallest set of best tokens whose probability reaches top_p); min-p (at least min_p times the best
        probability); then
        the first token in order of id at which the running sum of kept probability exceeds random * total.
        A row with a NaN, or with no token left, gives token id -1; the executor reports it as that sequence's failure.
        """
        ...
