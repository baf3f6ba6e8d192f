"""Attention and MLP with what surrounds them, in single ops: what `Ops.attention_sublayer` and `Ops.mlp_sublayer`
promise to equal, and what a layer calls whose projections are not plain weights.

Imports the interface only.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.ops.interface import Array, AttentionBatch, AttentionSublayer, LayerCache, MLPSublayer, Ops, SublayerLora

# x [T, K] -> [T, N]
Projection = Callable[[Array], Array]


def run_attention_sublayer(
    ops: Ops,
    sublayer: AttentionSublayer,
    residual: Array,
    positions: Array,
    attention: AttentionBatch,
    cache: LayerCache,
    lora: SublayerLora | None = None,
    project_qkv: Projection | None = None,
    project_output: Projection | None = None,
) -> None:
    """lora: added to what the projections give; what it adds to the output comes after the residual, where no norm lies
    between. project_qkv, project_output: instead of the sublayer's own weights and biases."""
    num_tokens, head_dim = residual.shape[0], sublayer.head_dim
    num_query, num_kv = sublayer.num_heads, sublayer.num_kv_heads
    x = ops.rms_norm(residual, sublayer.norm, sublayer.eps)
    qkv = ops.linear(x, sublayer.qkv, sublayer.qkv_bias) if project_qkv is None else project_qkv(x)
    if lora is not None:
        ops.lora_delta(x, qkv, lora.rows, lora.first)
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
    product = ops.linear(x, sublayer.output, sublayer.output_bias) if project_output is None else project_output(x)
    _add_product(ops, x, product, sublayer, residual, lora)


def run_mlp_sublayer(
    ops: Ops,
    sublayer: MLPSublayer,
    residual: Array,
    lora: SublayerLora | None = None,
    project_gate_up: Projection | None = None,
    project_down: Projection | None = None,
) -> None:
    """lora: as of the attention. project_gate_up, project_down: instead of the sublayer's own weights and biases."""
    x = ops.rms_norm(residual, sublayer.norm, sublayer.eps)
    gate_up = ops.linear(x, sublayer.gate_up, sublayer.gate_up_bias) if project_gate_up is None else project_gate_up(x)
    if lora is not None:
        ops.lora_delta(x, gate_up, lora.rows, lora.first)
    x = ops.gelu_and_mul(gate_up) if sublayer.is_gelu else ops.silu_and_mul(gate_up)
    product = ops.linear(x, sublayer.down, sublayer.down_bias) if project_down is None else project_down(x)
    _add_product(ops, x, product, sublayer, residual, lora)


def _add_product(
    ops: Ops,
    x: Array,
    product: Array,
    sublayer: AttentionSublayer | MLPSublayer,
    residual: Array,
    lora: SublayerLora | None,
) -> None:
    """residual += product of x, normed first where there is a norm, and of what the adapters make of x."""
    if sublayer.output_norm is None:
        ops.add(product, residual)
        if lora is not None:
            ops.lora_delta(x, residual, lora.rows, lora.second)
        return
    if lora is not None:
        ops.lora_delta(x, product, lora.rows, lora.second)
    ops.add(ops.rms_norm(product, sublayer.output_norm, sublayer.eps), residual)
