"""`ModelConfig`: all that a model's shape and arithmetic depend on, resolved from config.json or GGUF metadata.

What a checkpoint asks for and we do not do is refused by name, here, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import UnsupportedModelError
from octavo.models.rope import RopeConfig

MAX_LAYERS = 10_000  # a damaged file must not make us count to four billion

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only language model.

    architecture:     one of ARCHITECTURES
    head_dim:         numbers in one attention head; num_heads * head_dim need not be hidden_size
    rope:             rotary embedding of the layers, but those with a window when local_rope is given (Gemma 3)
    max_position_embeddings: the longest context in tokens, prompt and answer together
    query_scale:      attention scores are multiplied by it
    attention_soft_cap: c: scores become c * tanh(score / c); None is off
    embedding_scale:  the embedding's rows are multiplied by it
    activation:       "silu" or "gelu_tanh", of the gate
    attention_bias:   q, k and v have a bias; attention_output_bias: o has; mlp_bias: gate, up and down have
    has_qk_norm:      each head of q and k goes through an RMS norm
    layer_windows:    one entry a layer: None sees everything, a number w the last w tokens (its own included)
    eos_token_ids:    any of them ends a generation; may be empty
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    query_scale: float
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    activation: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key heads evenly"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"the head dimension is {self.head_dim}; rotary embedding needs an even one")

    def rope_of_layer(self, layer: int) -> RopeConfig:
        if self.local_rope is not None and self.layer_windows[layer] is not None:
            return self.local_rope
        return self.rope
