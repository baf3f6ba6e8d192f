"""The parts that models are made of, over `octavo.ops.interface.Ops`.

A layer keeps its parameters and gets everything else as arguments. `parameter_shapes` of a layer says which parameters
it wants, by their Hugging Face names; its constructor takes them from a `ParameterSource`. Arrays are passed from op to
op, sliced and reshaped; arithmetic on them is an op's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.models.config import ModelConfig
from octavo.ops.interface import Array, AttentionBatch, LayerCache, Ops, Weight

Shapes = dict[str, tuple[int, ...]]


class ParameterSource(Protocol):
    """Where a model under construction gets its parameters: on the device, shapes checked."""

    def weight(self, names: Sequence[str]) -> Weight:
        """The matrices of these names as one packed weight, outputs side by side."""
        ...

    def vector(self, names: Sequence[str]) -> Array:
        """The vectors of these names, joined, float32."""
        ...


class Linear:
    """x @ weight^T + bias, of one or several matrices that read the same x."""

    def __init__(self, source: ParameterSource, names: Sequence[str], has_bias: bool = False):
        self.names = tuple(names)
        self.weight = source.weight([f"{name}.weight" for name in names])
        self.bias = source.vector([f"{name}.bias" for name in names]) if has_bias else None

    def __call__(self, ops: Ops, x: Array) -> Array:
        return ops.linear(x, self.weight, self.bias)


class Attention:
    """Causal self-attention over the paged cache, with rotary embedding and optional norms of q and k."""

    def __init__(self, source: ParameterSource, config: ModelConfig, layer: int, prefix: str, rotary: Array):
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.scale = config.query_scale
        self.soft_cap = config.attention_soft_cap
        self.window = config.layer_windows[layer]
        self.eps = config.rms_norm_eps
        self.rotary = rotary
        self.qkv = Linear(
            source, [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")], config.attention_bias
        )
        self.output = Linear(source, [f"{prefix}.o_proj"], config.attention_output_bias)
        self.query_norm = source.vector([f"{prefix}.q_norm.weight"]) if config.has_qk_norm else None
        self.key_norm = source.vector([f"{prefix}.k_norm.weight"]) if config.has_qk_norm else None

    @staticmethod
    def parameter_shapes(config: ModelConfig, prefix: str) -> Shapes:
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes: Shapes = {}
        for name, num_outputs in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes |= linear_shapes(f"{prefix}.{name}", num_outputs, config.hidden_size, config.attention_bias)
        shapes |= linear_shapes(f"{prefix}.o_proj", config.hidden_size, query, config.attention_output_bias)
        if config.has_qk_norm:
            shapes |= {f"{prefix}.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes

    def __call__(self, ops: Ops, x: Array, positions: Array, attention: AttentionBatch, cache: LayerCache) -> Array:
        """x [T, hidden_size] -> [T, hidden_size]; writes the keys and values of its rows into the cache."""
        num_tokens, num_query = x.shape[0], self.num_heads
        # One reshape, then views of it: views are a good part of the Python time of a small step.
        heads = self.qkv(ops, x).reshape(num_tokens, self.num_qkv_heads, self.head_dim)
        query, key = heads[:, :num_query], heads[:, num_query : num_query + self.num_kv_heads]
        value = heads[:, num_query + self.num_kv_heads :]
        if self.query_norm is not None:
            query = ops.rms_norm(query, self.query_norm, self.eps)
            key = ops.rms_norm(key, self.key_norm, self.eps)
        ops.rotary_embedding(query, key, positions, self.rotary)
        ops.write_kv(key, value, cache, attention.slot_mapping)
        mixed = ops.paged_attention(query, cache, attention, self.scale, self.window, self.soft_cap)
        return self.output(ops, mixed.reshape(num_tokens, num_query * self.head_dim))


class GatedMLP:
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, source: ParameterSource, config: ModelConfig, prefix: str):
        self.gate_up = Linear(source, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], config.mlp_bias)
        self.down = Linear(source, [f"{prefix}.down_proj"], config.mlp_bias)
        self.is_gelu = config.activation == "gelu_tanh"

    @staticmethod
    def parameter_shapes(config: ModelConfig, prefix: str) -> Shapes:
        hidden, inner = config.hidden_size, config.intermediate_size
        return {
            **linear_shapes(f"{prefix}.gate_proj", inner, hidden, config.mlp_bias),
            **linear_shapes(f"{prefix}.up_proj", inner, hidden, config.mlp_bias),
            **linear_shapes(f"{prefix}.down_proj", hidden, inner, config.mlp_bias),
        }

    def __call__(self, ops: Ops, x: Array) -> Array:
        gate_up = self.gate_up(ops, x)
        return self.down(ops, ops.gelu_and_mul(gate_up) if self.is_gelu else ops.silu_and_mul(gate_up))


class EmbeddingAndHead:
    """The token table at the bottom and the projection to the vocabulary at the top, one matrix when they are tied."""

    def __init__(self, source: ParameterSource, config: ModelConfig):
        self.scale = config.embedding_scale
        self.table = source.weight(["model.embed_tokens.weight"])
        self.head = self.table if config.tie_word_embeddings else source.weight(["lm_head.weight"])
        self.norm = source.vector(["model.norm.weight"])
        self.eps = config.rms_norm_eps

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> Shapes:
        shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        return {**shapes, "model.norm.weight": (config.hidden_size,)}

    def embed(self, ops: Ops, token_ids: Array) -> Array:
        return ops.embedding(self.table, token_ids, self.scale)

    def logits(self, ops: Ops, residual: Array, rows: Array) -> Array:
        """Of the rows that are sampled, and of no other: [len(rows), vocab_size]."""
        return ops.linear(ops.rms_norm(ops.take_rows(residual, rows), self.norm, self.eps), self.head)


def linear_shapes(name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (num_outputs, num_inputs)}
    if has_bias:
        shapes[f"{name}.bias"] = (num_outputs,)
    return shapes
