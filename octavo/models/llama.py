"""The Llama family: Llama, SmolLM2, Mistral (sliding window), Qwen2 and 2.5 (bias on q, k, v). Touvron et al. 2023.

What tells them apart is in `ModelConfig`; the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.models.config import ModelConfig
from octavo.models.layers import Attention, EmbeddingAndHead, GatedMLP, ParameterSource, Shapes
from octavo.models.rope import RopeConfig
from octavo.ops.interface import Array, ForwardBatch, LayerCache, Ops


class LlamaLayer:
    def __init__(self, source: ParameterSource, config: ModelConfig, layer: int, rotary: Array):
        prefix = f"model.layers.{layer}"
        self.attention_norm = source.vector([f"{prefix}.input_layernorm.weight"])
        self.attention = Attention(source, config, layer, f"{prefix}.self_attn", rotary, norm=self.attention_norm)
        self.mlp_norm = source.vector([f"{prefix}.post_attention_layernorm.weight"])
        self.mlp = GatedMLP(source, config, f"{prefix}.mlp", norm=self.mlp_norm)

    @staticmethod
    def parameter_shapes(config: ModelConfig, layer: int) -> Shapes:
        prefix = f"model.layers.{layer}"
        return {
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
            **Attention.parameter_shapes(config, f"{prefix}.self_attn"),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
            **GatedMLP.parameter_shapes(config, f"{prefix}.mlp"),
        }


class LlamaModel:
    """rotary: a table of cosines and sines for each rotary embedding of the config."""

    def __init__(self, config: ModelConfig, source: ParameterSource, rotary: Mapping[RopeConfig, Array]):
        self.config = config
        self.num_weight_bytes = 0  # the loader's to fill in, when all is loaded
        self.matrix_bytes: dict[str, int] = {}  # likewise
        self.ends = EmbeddingAndHead(source, config)
        self.layers = [
            LlamaLayer(source, config, layer, rotary[config.rope_of_layer(layer)]) for layer in range(config.num_layers)
        ]

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> Shapes:
        shapes = EmbeddingAndHead.parameter_shapes(config)
        for layer in range(config.num_layers):
            shapes |= LlamaLayer.parameter_shapes(config, layer)
        return shapes

    def __call__(self, ops: Ops, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Array:
        """Logits of the wanted rows, [len(batch.logits_rows), vocab_size] float32; writes to the cache."""
        residual = self.ends.embed(ops, batch.token_ids)
        for layer, group, cache in zip(self.layers, batch.layer_group, kv_cache, strict=True):
            layer.attention(ops, residual, batch.positions, batch.attention[group], cache)
            layer.mlp(ops, residual)
        return self.ends.logits(ops, residual, batch.logits_rows)
