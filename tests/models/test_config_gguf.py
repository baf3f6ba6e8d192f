"""GGUF metadata to ModelConfig: what is read, and refusals by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CorruptFileError, ModelLoadError, UnsupportedModelError
from octavo.models import config_gguf
from octavo.models.config_gguf import config_from_gguf
from octavo.models.rope import FrequencyDivisors, LinearScaling, RopeConfig

SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (100, 64)}


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Changes by the key after the architecture, with __ for a dot; None removes a key."""
    keys: dict[str, Any] = {
        "block_count": 7,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "attention__layer_norm_rms_epsilon": 9.999999747378752e-06,
        "rope__freq_base": 100_000.0,
        **changes,
    }
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2, **named}


def test_a_plain_llama() -> None:
    config = config_from_gguf(metadata(), SHAPES)
    assert (config.architecture, config.vocab_size, config.head_dim) == ("llama", 100, 16)
    assert config.rms_norm_eps == 1e-5
    assert config.rope == RopeConfig(100_000.0, 16)
    assert config.layer_windows == (None,) * 7
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.max_position_embeddings == 512


def test_head_and_biases_are_seen_in_the_tensors() -> None:
    shapes = {**SHAPES, "output.weight": (100, 64), "blk.0.attn_q.bias": (64,)}
    config = config_from_gguf(metadata("qwen2"), shapes)
    assert not config.tie_word_embeddings
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, False, False)


def test_rope_divisors_become_the_scaling() -> None:
    config = config_from_gguf(metadata(), SHAPES, rope_divisors=(1.0,) * 4 + (8.0,) * 4)
    assert config.rope.scaling == FrequencyDivisors((1.0,) * 4 + (8.0,) * 4)


def test_linear_scaling() -> None:
    scaled = metadata(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert config_from_gguf(scaled, SHAPES).rope.scaling == LinearScaling(4.0)
    assert config_from_gguf(metadata(rope__scale_linear=2.0), SHAPES).rope.scaling == LinearScaling(2.0)
    assert config_from_gguf(metadata(rope__scaling__type="none"), SHAPES).rope.scaling is None


def test_gemma3() -> None:
    config = config_from_gguf(metadata("gemma3", attention__key_length=32, attention__sliding_window=512), SHAPES)
    assert config.head_dim == 32
    assert config.layer_windows == (512, 512, 512, 512, 512, None, 512)
    assert config.local_rope == RopeConfig(10_000.0, 32)
    assert config.embedding_scale == 8.0
    assert config.activation == "gelu_tanh"
    assert config.query_scale == 32**-0.5
    assert config.has_qk_norm


def test_the_largest_gemma3_scales_queries_by_its_own_rule() -> None:
    keys = metadata("gemma3", block_count=62, attention__key_length=32, attention__sliding_window=8)
    config = config_from_gguf(keys, SHAPES)
    assert config.query_scale == (64 / 4) ** -0.5


def test_a_pattern_may_list_the_layers() -> None:
    pattern = [True, False] * 3 + [True]
    keys = metadata("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=pattern)
    assert config_from_gguf(keys, SHAPES).layer_windows == (8, None, 8, None, 8, None, 8)


def test_ends_of_turn_are_found_among_the_control_tokens() -> None:
    keys = metadata()
    keys["tokenizer.ggml.tokens"] = ["a", "<|im_end|>", "</s>", "<end_of_turn>", "<|eot_id|>"]
    keys["tokenizer.ggml.token_type"] = [1, 3, 3, 1, 3]  # <end_of_turn> is ordinary text here
    keys["tokenizer.ggml.eot_token_id"] = 4
    assert config_from_gguf(keys, SHAPES).eos_token_ids == (2, 4, 1)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (metadata("mamba"), "'mamba'"),
        ({}, "None"),
        (metadata(expert_count=8), r"llama\.expert_count is 8"),
        (metadata(use_parallel_residual=True), r"llama\.use_parallel_residual is True"),
        (metadata(attention__causal=False), r"llama\.attention\.causal is False"),
        (metadata(attention__scale=0.5), r"llama\.attention\.scale"),
        (metadata(rope__scaling__type="yarn"), "'yarn'"),
        (metadata(rope__dimension_count=8), "partial rotation"),
        (metadata(attention__head_count_kv=[2, 2, 2, 2, 2, 2, 1]), "differs from layer to layer"),
        (metadata(attention__value_length=8), "value_length"),
        (metadata("qwen2", attention__sliding_window=64), "attention.sliding_window is 64"),
        (metadata(attention__head_count_kv=3), "cannot share"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_gguf(keys, SHAPES)


def test_keys_that_switch_a_feature_off_and_equal_lists_are_fine() -> None:
    config = config_from_gguf(metadata(expert_count=0, logit_scale=1.0, attention__head_count_kv=[2] * 7), SHAPES)
    assert config.num_kv_heads == 2


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (metadata(block_count=None), r"llama\.block_count is missing"),
        (metadata(embedding_length=0), r"llama\.embedding_length is 0"),
        (metadata(embedding_length="64"), "is '64'"),
        (metadata(rope__freq_base=float("inf")), "freq_base is inf"),
        (metadata(attention__layer_norm_rms_epsilon=None), "epsilon is missing"),
        (metadata("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=[True]), "list 7 layers"),
        (metadata("gemma3", attention__sliding_window=8, attention__sliding_window_pattern="x"), "pattern is 'x'"),
        (metadata("gemma3"), r"gemma3\.attention\.sliding_window is 0|sliding_window is missing"),
    ],
)
def test_values_that_make_no_sense_are_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptFileError, match=named):
        config_from_gguf(keys, SHAPES)


def test_a_file_without_embedding_and_wrong_divisors_are_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"token_embd\.weight"):
        config_from_gguf(metadata(), {})
    with pytest.raises(CorruptFileError, match=r"rope_freqs\.weight must hold 8"):
        config_from_gguf(metadata(), SHAPES, rope_divisors=(1.0,) * 3)


VALUES = st.recursive(
    st.booleans() | st.integers(-3, 2**40) | st.floats() | st.sampled_from(["", "linear", "x"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    "general.architecture",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.eos_token_id",
    *(f"gemma3.{key}" for key in sorted(config_gguf._KNOWN_KEYS)),
    "gemma3.unheard_of",
]


@settings(max_examples=500, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_whatever_the_metadata_says_it_is_read_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ModelLoadError):
        config = config_from_gguf({**metadata("gemma3", attention__sliding_window=8), **changes}, SHAPES)
        assert len(config.layer_windows) == config.num_layers
