"""Tiny random models of every architecture, saved by transformers, with transformers as the oracle.

Importing this module skips the importing test module where torch or transformers are absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    torch = pytest.importorskip("torch", reason="torch is the oracle of these tests; pip install 'octavo[oracle]'")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is the oracle of these tests; pip install 'octavo[oracle]'"
    )

VOCAB_SIZE = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **parameters}


def _gemma3(**changes: Any) -> Any:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    base = {**_COMMON, "head_dim": 32, "sliding_window": 5, "layer_types": layer_types, "query_pre_attn_scalar": 32}
    return transformers.Gemma3TextConfig(**(base | changes))


_LLAMA3_ROPE = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON | {"num_key_value_heads": 4}),
    "llama-gqa-tied": lambda: transformers.LlamaConfig(**_COMMON | {"tie_word_embeddings": True}),
    "llama-wide-heads": lambda: transformers.LlamaConfig(**_COMMON | {"head_dim": 24}),
    "llama-biases": lambda: transformers.LlamaConfig(**_COMMON | {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**_COMMON | {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": lambda: transformers.LlamaConfig(**_COMMON | {"rope_parameters": _rope("linear", factor=3.0)}),
    "mistral-window": lambda: transformers.MistralConfig(**_COMMON | {"sliding_window": 6}),
    "mistral-no-window": lambda: transformers.MistralConfig(**_COMMON | {"sliding_window": None}),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **_COMMON | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": _gemma3,
    "gemma3-scaled-rope": lambda: _gemma3(
        query_pre_attn_scalar=21,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def make_model(config: Any, seed: int = 0) -> Any:
    """A random float32 model whose activations are of order 1, so that a wrong detail shows in the logits."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * noise)  # around 1, or 0 in Gemma
            elif parameter.ndim == 2:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.5 * noise)
    return model


def expected_logits(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """[len(token_ids), vocab_size] float32"""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float().numpy()


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
