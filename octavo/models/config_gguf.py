"""GGUF metadata to `ModelConfig`. The keys are those of the ggml project's gguf.md, as llama.cpp reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.models.config import MAX_LAYERS, ModelConfig
from octavo.models.rope import FrequencyDivisors, LinearScaling, RopeConfig, Scaling

# GGUF's architecture name -> ours. Mistral files call themselves llama.
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

# Keys after "<architecture>." that are read below, or that change nothing in the arithmetic.
_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scale_linear",
        "tensor_data_layout",
    }
)
# Values by which a key says that its feature is off.
_OFF: tuple[Any, ...] = (0, "", "none", [])
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "embedding_scale": (*_OFF, 1),
    "logit_scale": (*_OFF, 1),
    "residual_scale": (*_OFF, 1),
}

_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_WINDOW_PATTERN = 6  # every sixth layer sees everything
_GEMMA_27B_LAYERS = 62  # the one size whose query scale is not 1 / sqrt(head_dim)

# Ends of a turn that a GGUF file often does not name in its metadata; taken when they are control tokens.
_END_OF_TURN_TEXTS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eom_id|>")
_CONTROL_TOKEN = 3


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: Sequence[float] | None = None,
) -> ModelConfig:
    """The model that a GGUF file describes.

    tensor_shapes: of the file's tensors by GGUF name, in NumPy order; the vocabulary's size, the head's presence and
                   the biases are read from them, since the metadata does not tell
    rope_divisors: the numbers of the file's rope_freqs.weight, if it has that tensor (Llama 3)
    Raises UnsupportedModelError, with the key's name, for what Octavo cannot run, and CorruptFileError for a value
    that makes no sense.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"the architecture {name!r} is not one that Octavo reads from GGUF; these are: {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[name]
    keys = _Keys(metadata, name)
    keys.refuse_unknown()
    hidden_size = keys.positive_int("embedding_length")
    num_layers = keys.positive_int("block_count", maximum=MAX_LAYERS)
    num_heads = keys.positive_int("attention.head_count")
    head_dim = keys.positive_int("attention.key_length", default=max(1, hidden_size // num_heads))
    if keys.positive_int("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(f"{name}.attention.value_length differs from the key length {head_dim}")
    if "token_embd.weight" not in tensor_shapes:
        raise CorruptFileError("the file has no tensor token_embd.weight")
    is_gemma = architecture == "gemma3"
    rope = _rope(keys, head_dim, rope_divisors)
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensor_shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.positive_int("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        intermediate_size=keys.positive_int("feed_forward_length"),
        rms_norm_eps=keys.positive_float("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=RopeConfig(keys.positive_float("rope.freq_base_swa", _GEMMA_LOCAL_THETA), head_dim)
        if is_gemma
        else None,
        max_position_embeddings=keys.positive_int("context_length"),
        layer_windows=_layer_windows(keys, architecture, num_layers),
        query_scale=(hidden_size / num_heads if is_gemma and num_layers == _GEMMA_27B_LAYERS else head_dim) ** -0.5,
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        activation="gelu_tanh" if is_gemma else "silu",
        tie_word_embeddings="output.weight" not in tensor_shapes,
        attention_bias="blk.0.attn_q.bias" in tensor_shapes,
        attention_output_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_up.bias" in tensor_shapes,
        has_qk_norm=architecture in ("qwen3", "gemma3"),
        bos_token_id=keys.token_id("bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata, keys),
    )


class _Keys:
    """The keys of one architecture, with typed access."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self._metadata = metadata
        self._prefix = architecture + "."

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(self._prefix + key, default)

    def refuse_unknown(self) -> None:
        for full_key, value in self._metadata.items():
            key = full_key.removeprefix(self._prefix)
            if key != full_key and key not in _KNOWN_KEYS and value not in _OFF_VALUES.get(key, _OFF):
                raise UnsupportedModelError(f"{full_key} is {str(value)[:80]}, a setting that Octavo does not support")

    def positive_int(self, key: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise CorruptFileError(f"the metadata key {self._prefix}{key} is missing")
        if isinstance(value, list) and value and all(other == value[0] for other in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self._prefix}{key} differs from layer to layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise CorruptFileError(f"{self._prefix}{key} is {value!r}, not a whole number between 1 and {maximum}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise CorruptFileError(f"the metadata key {self._prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise CorruptFileError(f"{self._prefix}{key} is {value!r}, not a positive number")
        # Stored as float32: 1e-5 reads as 9.99999975e-06. The shortest decimal of that float32 is what was meant.
        return float(f"{value:.7g}")

    def token_id(self, key: str) -> int | None:
        value = self._metadata.get("tokenizer.ggml." + key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def _rope(keys: _Keys, head_dim: int, divisors: Sequence[float] | None) -> RopeConfig:
    rotary_dim = keys.positive_int("rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"rope.dimension_count is {rotary_dim} with heads of {head_dim}: partial rotation is not supported"
        )
    theta = keys.positive_float("rope.freq_base", 10_000.0)
    scaling = _rope_scaling(keys)
    if divisors is not None:
        if scaling is not None:
            raise UnsupportedModelError("the file has both rope.scaling and rope_freqs.weight, which is not supported")
        if len(divisors) != head_dim // 2 or not all(0 < divisor < math.inf for divisor in divisors):
            raise CorruptFileError(f"rope_freqs.weight must hold {head_dim // 2} positive numbers")
        scaling = FrequencyDivisors(tuple(float(divisor) for divisor in divisors))
    return RopeConfig(theta, rotary_dim, scaling)


def _rope_scaling(keys: _Keys) -> Scaling | None:
    kind = keys.get("rope.scaling.type", "linear" if keys.get("rope.scale_linear") else "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"rope.scaling.type is {kind!r}; none and linear are supported")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0, 1):  # llama.cpp writes 0 for "not scaled"
        return None
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise CorruptFileError(f"rope.scaling.factor is {factor!r}, not a positive number")
    return LinearScaling(float(factor))


def _layer_windows(keys: _Keys, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = keys.get("attention.sliding_window", 0)
    if window in (0, None) and architecture != "gemma3":
        return (None,) * num_layers
    window = keys.positive_int("attention.sliding_window")
    if architecture == "gemma3":
        pattern = keys.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            if len(pattern) != num_layers:
                raise CorruptFileError(f"attention.sliding_window_pattern must list {num_layers} layers")
            return tuple(window if is_sliding else None for is_sliding in pattern)
        pattern = keys.positive_int("attention.sliding_window_pattern", default=_GEMMA_WINDOW_PATTERN)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if architecture == "llama" or window >= keys.positive_int("context_length"):
        return (window,) * num_layers
    raise UnsupportedModelError(f"attention.sliding_window is {window}, which is not supported for {architecture}")


def _eos_token_ids(metadata: Mapping[str, Any], keys: _Keys) -> tuple[int, ...]:
    """The named ends, then control tokens whose text says that they end a turn."""
    named = (keys.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    found = [token_id for token_id in named if token_id is not None]
    texts, token_types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(texts, list) and isinstance(token_types, list):
        for token_id, token_type in enumerate(token_types[: len(texts)]):
            is_end = token_type == _CONTROL_TOKEN and texts[token_id] in _END_OF_TURN_TEXTS
            if is_end and token_id not in found:
                found.append(token_id)
    return tuple(found)
