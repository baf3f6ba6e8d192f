"""The parts that models are made of, over `octavo.ops.interface.Ops`.

A layer keeps its parameters and gets everything else as arguments. `parameter_shapes` of a layer says which parameters
it wants, by their Hugging Face names; its constructor takes them from a `ParameterSource`. Arrays are passed from op to
op, sliced and reshaped; arithmetic on them is an op's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from octavo.models.config import ModelConfig
from octavo.ops.interface import (
    Array,
    AttentionBatch,
    AttentionSublayer,
    LayerCache,
    MLPSublayer,
    Ops,
    Weight,
)
from octavo.ops.sublayers import run_attention_sublayer, run_mlp_sublayer

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
    """residual += output(attend(qkv(norm(residual)))): causal self-attention over the paged cache, with rotary
    embedding, optional norms of q and k, and an optional norm of what is added.

    qkv, output: may be replaced after construction by anything that is called like a Linear; then the sublayer is run
                 op by op, which gives the same bits for the same arithmetic
    """

    def __init__(
        self,
        source: ParameterSource,
        config: ModelConfig,
        layer: int,
        prefix: str,
        rotary: Array,
        *,
        norm: Array,
        output_norm: Array | None = None,
    ):
        self.qkv = Linear(
            source, [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")], config.attention_bias
        )
        self.output = Linear(source, [f"{prefix}.o_proj"], config.attention_output_bias)
        self.sublayer = AttentionSublayer(
            norm=norm,
            eps=config.rms_norm_eps,
            qkv=self.qkv.weight,
            qkv_bias=self.qkv.bias,
            query_norm=source.vector([f"{prefix}.q_norm.weight"]) if config.has_qk_norm else None,
            key_norm=source.vector([f"{prefix}.k_norm.weight"]) if config.has_qk_norm else None,
            rotary=rotary,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.query_scale,
            sliding_window=config.layer_windows[layer],
            soft_cap=config.attention_soft_cap,
            output=self.output.weight,
            output_bias=self.output.bias,
            output_norm=output_norm,
        )

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

    def __call__(
        self, ops: Ops, residual: Array, positions: Array, attention: AttentionBatch, cache: LayerCache
    ) -> None:
        """residual [T, hidden_size] is changed; the keys and values of its rows are written into the cache."""
        if type(self.qkv) is Linear and type(self.output) is Linear:
            ops.attention_sublayer(self.sublayer, residual, positions, attention, cache)
            return
        run_attention_sublayer(
            ops,
            self.sublayer,
            residual,
            positions,
            attention,
            cache,
            project_qkv=partial(self.qkv, ops),
            project_output=partial(self.output, ops),
        )


class GatedMLP:
    """residual += down(activation(gate(x)) * up(x)) with x = norm(residual), and an optional norm of what is added.

    gate_up, down: may be replaced after construction, as those of `Attention`
    """

    def __init__(
        self,
        source: ParameterSource,
        config: ModelConfig,
        prefix: str,
        *,
        norm: Array,
        output_norm: Array | None = None,
    ):
        self.gate_up = Linear(source, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], config.mlp_bias)
        self.down = Linear(source, [f"{prefix}.down_proj"], config.mlp_bias)
        self.sublayer = MLPSublayer(
            norm=norm,
            eps=config.rms_norm_eps,
            gate_up=self.gate_up.weight,
            gate_up_bias=self.gate_up.bias,
            is_gelu=config.activation == "gelu_tanh",
            down=self.down.weight,
            down_bias=self.down.bias,
            output_norm=output_norm,
        )

    @staticmethod
    def parameter_shapes(config: ModelConfig, prefix: str) -> Shapes:
        hidden, inner = config.hidden_size, config.intermediate_size
        return {
            **linear_shapes(f"{prefix}.gate_proj", inner, hidden, config.mlp_bias),
            **linear_shapes(f"{prefix}.up_proj", inner, hidden, config.mlp_bias),
            **linear_shapes(f"{prefix}.down_proj", hidden, inner, config.mlp_bias),
        }

    def __call__(self, ops: Ops, residual: Array) -> None:
        """residual [T, hidden_size] is changed."""
        if type(self.gate_up) is Linear and type(self.down) is Linear:
            ops.mlp_sublayer(self.sublayer, residual)
            return
        run_mlp_sublayer(
            ops,
            self.sublayer,
            residual,
            project_gate_up=partial(self.gate_up, ops),
            project_down=partial(self.down, ops),
        )


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
        return ops.logits(residual, rows, self.norm, self.eps, self.head)


def linear_shapes(name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (num_outputs, num_inputs)}
    if has_bias:
        shapes[f"{name}.bias"] = (num_outputs,)
    return shapes
