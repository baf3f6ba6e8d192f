"""Gemma 3, text. Gemma Team 2025.

Five layers in six see a window only and have a rotary embedding of their own; the input and the output of attention and
MLP are normed; q and k are normed; embeddings are scaled; the MLP is gated by GELU. All but the four norms is
`ModelConfig`'s to say. Norm weights are the full factor (see `octavo.weights.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.models.config import ModelConfig
from octavo.models.layers import Attention, EmbeddingAndHead, GatedMLP, ParameterSource, Shapes
from octavo.models.rope import RopeConfig
from octavo.ops.interface import Array, ForwardBatch, LayerCache, Ops

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma3Layer:
    def __init__(self, source: ParameterSource, config: ModelConfig, layer: int, rotary: Array):
        prefix = f"model.layers.{layer}"
        attention_norm, attention_output_norm, mlp_norm, mlp_output_norm = (
            source.vector([f"{prefix}.{name}.weight"]) for name in _NORMS
        )
        self.attention = Attention(
            source,
            config,
            layer,
            f"{prefix}.self_attn",
            rotary,
            norm=attention_norm,
            output_norm=attention_output_norm,
        )
        self.mlp = GatedMLP(source, config, f"{prefix}.mlp", norm=mlp_norm, output_norm=mlp_output_norm)

    @staticmethod
    def parameter_shapes(config: ModelConfig, layer: int) -> Shapes:
        prefix = f"model.layers.{layer}"
        return {
            **{f"{prefix}.{name}.weight": (config.hidden_size,) for name in _NORMS},
            **Attention.parameter_shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.parameter_shapes(config, f"{prefix}.mlp"),
        }


class Gemma3Model:
    """rotary: a table of cosines and sines for each rotary embedding of the config."""

    def __init__(self, config: ModelConfig, source: ParameterSource, rotary: Mapping[RopeConfig, Array]):
        self.config = config
        self.num_weight_bytes = 0  # the loader's to fill in, when all is loaded
        self.matrix_bytes: dict[str, int] = {}  # likewise
        self.ends = EmbeddingAndHead(source, config)
        self.layers = [
            Gemma3Layer(source, config, layer, rotary[config.rope_of_layer(layer)])
            for layer in range(config.num_layers)
        ]

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> Shapes:
        shapes = EmbeddingAndHead.parameter_shapes(config)
        for layer in range(config.num_layers):
            shapes |= Gemma3Layer.parameter_shapes(config, layer)
        return shapes

    def __call__(self, ops: Ops, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Array:
        """Logits of the wanted rows, [len(batch.logits_rows), vocab_size] float32; writes to the cache."""
        residual = self.ends.embed(ops, batch.token_ids)
        for layer, group, cache in zip(self.layers, batch.layer_group, kv_cache, strict=True):
            layer.attention(ops, residual, batch.positions, batch.attention[group], cache)
            layer.mlp(ops, residual)
        return self.ends.logits(ops, residual, batch.logits_rows)
