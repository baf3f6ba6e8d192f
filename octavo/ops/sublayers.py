"""Attention and MLP with what surrounds them, in single ops: what `Ops.attention_sublayer` and `Ops.mlp_sublayer`
promise to equal, and what a layer calls whose projections are not plain weights (an adapter wraps one, say).

Imports the interface only.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.ops.interface import Array, AttentionBatch, AttentionSublayer, LayerCache, MLPSublayer, Ops

# x [T, K] -> [T, N]
Projection = Callable[[Array], Array]


def run_attention_sublayer(
    ops: Ops,
    sublayer: AttentionSublayer,
    residual: Array,
    positions: Array,
    attention: AttentionBatch,
    cache: LayerCache,
    project_qkv: Projection | None = None,
    project_output: Projection | None = None,
) -> None:
    """project_qkv, project_output: instead of the sublayer's own weights and biases."""
    num_tokens, head_dim = residual.shape[0], sublayer.head_dim
    num_query, num_kv = sublayer.num_heads, sublayer.num_kv_heads
    x = ops.rms_norm(residual, sublayer.norm, sublayer.eps)
    qkv = ops.linear(x, sublayer.qkv, sublayer.qkv_bias) if project_qkv is None else project_qkv(x)
    heads = qkv.reshape(num_tokens, num_query + 2 * num_kv, head_dim)
    query, key, value = heads[:, :num_query], heads[:, num_query : num_query + num_kv], heads[:, num_query + num_kv :]
    if sublayer.query_norm is not None:
        query = ops.rms_norm(query, sublayer.query_norm, sublayer.eps)
    if sublayer.key_norm is not None:
        key = ops.rms_norm(key, sublayer.key_norm, sublayer.eps)
    ops.rotary_embedding(query, key, positions, sublayer.rotary)
    ops.write_kv(key, value, cache, attention.slot_mapping)
    mixed = ops.paged_attention(query, cache, attention, sublayer.scale, sublayer.sliding_window, sublayer.soft_cap)
    x = mixed.reshape(num_tokens, num_query * head_dim)
    x = ops.linear(x, sublayer.output, sublayer.output_bias) if project_output is None else project_output(x)
    if sublayer.output_norm is not None:
        x = ops.rms_norm(x, sublayer.output_norm, sublayer.eps)
    ops.add(x, residual)


def run_mlp_sublayer(
    ops: Ops,
    sublayer: MLPSublayer,
    residual: Array,
    project_gate_up: Projection | None = None,
    project_down: Projection | None = None,
) -> None:
    """project_gate_up, project_down: instead of the sublayer's own weights and biases."""
    x = ops.rms_norm(residual, sublayer.norm, sublayer.eps)
    gate_up = ops.linear(x, sublayer.gate_up, sublayer.gate_up_bias) if project_gate_up is None else project_gate_up(x)
    x = ops.gelu_and_mul(gate_up) if sublayer.is_gelu else ops.silu_and_mul(gate_up)
    x = ops.linear(x, sublayer.down, sublayer.down_bias) if project_down is None else project_down(x)
    if sublayer.output_norm is not None:
        x = ops.rms_norm(x, sublayer.output_norm, sublayer.eps)
    ops.add(x, residual)
