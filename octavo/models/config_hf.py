"""config.json (and generation_config.json) to `ModelConfig`.

Both spellings are read: transformers 5 with `rope_parameters`, and the older `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.models.config import MAX_LAYERS, ModelConfig
from octavo.models.rope import LinearScaling, Llama3Scaling, RopeConfig

_ARCHITECTURE_OF_CLASS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # its text part
}
_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}

# What transformers assumes when a key is absent; older files leave out what equals these.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"},
    "mistral": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}

# Settings that change the arithmetic and that none of our models does: key -> the values that mean "off".
_OFF: tuple[Any, ...] = (None, False, 0, [], {}, "")
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "n_routed_experts": _OFF,
    "kv_lora_rank": _OFF,
    "q_lora_rank": _OFF,
    "no_rope_layers": _OFF,
    # Gemma 3's config has the keys of Gemma 2's two caps, but no model sets them, and transformers drops the first.
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "use_bidirectional_attention": _OFF,
    "attention_multiplier": (*_OFF, 1.0),
    "embedding_multiplier": (*_OFF, 1.0),
    "residual_multiplier": (*_OFF, 1.0),
    "logits_scaling": (*_OFF, 1.0),
    "partial_rotary_factor": (None, 1.0),
    "attention_chunk_size": _OFF,
    "use_qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "alibi": _OFF,
}


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model that a config.json describes.

    Raises UnsupportedModelError, with the setting's name, for what Octavo cannot run, and CorruptFileError for a
    value that makes no sense.
    """
    architecture = architecture_of_hf(config)
    settings = _Settings(_text_part(config), _DEFAULTS[architecture])
    settings.refuse_unsupported(architecture)
    num_heads = settings.whole_number("num_attention_heads")
    hidden_size = settings.whole_number("hidden_size")
    num_layers = settings.whole_number("num_hidden_layers", maximum=MAX_LAYERS)
    head_dim = settings.whole_number("head_dim", default=max(1, hidden_size // num_heads))
    attention_bias = architecture == "qwen2" or settings.flag("attention_bias")
    is_gemma = architecture == "gemma3"
    rope, local_rope = _ropes(settings, head_dim, has_local=is_gemma)
    return ModelConfig(
        architecture=architecture,
        vocab_size=settings.whole_number("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.whole_number("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        intermediate_size=settings.whole_number("intermediate_size"),
        rms_norm_eps=settings.positive_float("rms_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        max_position_embeddings=settings.whole_number("max_position_embeddings"),
        layer_windows=_layer_windows(settings, architecture, num_layers),
        query_scale=settings.positive_float("query_pre_attn_scalar", default=head_dim) ** -0.5
        if is_gemma
        else head_dim**-0.5,
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        activation=_activation(settings, "hidden_activation" if is_gemma else "hidden_act"),
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and architecture != "qwen2",
        mlp_bias=architecture == "llama" and settings.flag("mlp_bias"),
        has_qk_norm=architecture in ("qwen3", "gemma3"),
        bos_token_id=_first_id(settings.get("bos_token_id")),
        eos_token_ids=_eos_token_ids(settings, config, generation_config or {}),
    )


def architecture_of_hf(config: Mapping[str, Any]) -> str:
    """The name in ARCHITECTURES of a config.json. Raises UnsupportedModelError for all others."""
    classes = config.get("architectures") or []
    if isinstance(classes, list) and classes:
        name, known = str(classes[0]), _ARCHITECTURE_OF_CLASS
    else:
        name, known = str(config.get("model_type")), _ARCHITECTURE_OF_MODEL_TYPE
    if name not in known:
        raise UnsupportedModelError(
            f"the architecture {name} is not one that Octavo has; these are: {', '.join(_ARCHITECTURE_OF_CLASS)}"
        )
    return known[name]


class _Settings:
    """A config.json with the architecture's defaults behind it, and typed access."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._config = config
        self._defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        """A key that is present counts as it is, null too: a null sliding_window means none."""
        if key in self._config:
            return self._config[key]
        return self._defaults.get(key, default)

    def whole_number(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CorruptFileError(f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise CorruptFileError(
                f"config.json: {key} is {value!r}, not a whole number between {minimum} and {maximum}"
            )
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        return _positive_float(default if value is None else value, key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise CorruptFileError(f"config.json: {key} is {value!r}, not true or false")
        return bool(value)

    def refuse_unsupported(self, architecture: str) -> None:
        for key, off_values in _NOT_SUPPORTED.items():
            value = self.get(key)
            if value not in off_values:
                shown = str(value)[:80]
                raise UnsupportedModelError(
                    f"config.json: {key} is {shown}, which Octavo does not support for {architecture} models"
                )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees images, the part that writes; keys missing there are looked up outside."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**outer, **text}


def _ropes(settings: _Settings, head_dim: int, *, has_local: bool) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of full layers and, for Gemma 3, of windowed ones (which are never scaled)."""
    parameters = settings.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters:
        by_layer_type = any(isinstance(value, Mapping) for value in parameters.values())
        full = parameters.get("full_attention") if by_layer_type else parameters
        local = parameters.get("sliding_attention") if by_layer_type else None
        if not isinstance(full, Mapping):
            raise CorruptFileError("config.json: rope_parameters has no full_attention")
    else:
        scaling = settings.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise CorruptFileError(f"config.json: rope_scaling is {scaling!r}, not an object")
        full = dict(scaling)
        full.setdefault("rope_theta", settings.get("rope_theta", 10_000.0))
        local = None
    rope = _rope(full, head_dim, settings)
    if not has_local:
        return rope, None
    local = local or {"rope_theta": settings.get("rope_local_base_freq")}
    return rope, _rope(local, head_dim, settings)


def _rope(parameters: Mapping[str, Any], head_dim: int, settings: _Settings) -> RopeConfig:
    theta = _positive_float(parameters.get("rope_theta", settings.get("rope_theta", 10_000.0)), "rope_theta")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {parameters['partial_rotary_factor']!r}; only 1 is supported"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    scaling: LinearScaling | Llama3Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(_positive_float(parameters.get("factor"), "the rope factor"))
    elif kind == "llama3":
        original = parameters.get("original_max_position_embeddings", settings.get("original_max_position_embeddings"))
        scaling = Llama3Scaling(
            factor=_positive_float(parameters.get("factor"), "the rope factor"),
            low_freq_factor=_positive_float(parameters.get("low_freq_factor"), "low_freq_factor"),
            high_freq_factor=_positive_float(parameters.get("high_freq_factor"), "high_freq_factor"),
            original_max_positions=int(_positive_float(original, "original_max_position_embeddings")),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise CorruptFileError("config.json: high_freq_factor must be larger than low_freq_factor")
    elif kind != "default":
        raise UnsupportedModelError(
            f"config.json: the rope scaling {kind!r} is not supported; default, linear and llama3 are"
        )
    return RopeConfig(theta=theta, rotary_dim=head_dim, scaling=scaling)


def _layer_windows(settings: _Settings, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    layer_types = settings.get("layer_types")
    window = settings.get("sliding_window")
    if architecture in ("qwen2", "qwen3") and not settings.flag("use_sliding_window"):
        window = None
    if architecture == "llama":  # the class has no window, whatever its file says
        window = None
    if window is not None or architecture == "gemma3":  # whose windowed layers have a rotary embedding of their own
        window = settings.whole_number("sliding_window")
    if layer_types is None:
        layer_types = [
            "sliding_attention" if _is_sliding(settings, architecture, layer) else "full_attention"
            for layer in range(num_layers)
        ]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CorruptFileError(f"config.json: layer_types must list {num_layers} layers")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, which Octavo does not support")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _is_sliding(settings: _Settings, architecture: str, layer: int) -> bool:
    if architecture == "gemma3":
        return (layer + 1) % settings.whole_number("sliding_window_pattern") != 0
    if architecture in ("qwen2", "qwen3"):
        return layer >= settings.whole_number("max_window_layers", minimum=0)
    return True


def _activation(settings: _Settings, key: str) -> str:
    name = settings.get(key)
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(f"config.json: {key} is {name!r}; silu and gelu_pytorch_tanh are supported")
    return known[name]


def _eos_token_ids(
    settings: _Settings, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The union, in order: generation_config.json knows the end of a turn, config.json the end of a text."""
    found: list[int] = []
    for value in (generation_config.get("eos_token_id"), config.get("eos_token_id"), settings.get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and token_id not in found:
                found.append(token_id)
    return tuple(found)


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _positive_float(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CorruptFileError(f"config.json: {name} is {value!r}, not a positive number")
    return float(value)
