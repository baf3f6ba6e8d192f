"""config.json to ModelConfig: both spellings, defaults, and refusals by name. No oracle needed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CorruptFileError, ModelLoadError, UnsupportedModelError
from octavo.models.config_hf import config_from_hf
from octavo.models.rope import LinearScaling, Llama3Scaling, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "intermediate_size": 96,
    "sliding_window": 512,
}


def test_a_plain_llama() -> None:
    config = config_from_hf(LLAMA)
    assert config.architecture == "llama"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.rope == RopeConfig(10_000.0, 16)
    assert config.local_rope is None
    assert config.layer_windows == (None, None)
    assert config.query_scale == 0.25
    assert config.embedding_scale == 1.0
    assert not config.tie_word_embeddings
    assert not config.attention_bias


def test_without_num_key_value_heads_each_head_has_its_own() -> None:
    assert config_from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


OLD_SCALING = {"type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, RopeConfig(5e5, 16)),
        (
            {"rope_theta": 5e5, "rope_scaling": OLD_SCALING},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            RopeConfig(5e5, 16, LinearScaling(2.0)),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {**LLAMA3, "rope_theta": 5e5},
            RopeConfig(5e5, 16, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}, RopeConfig(5e5, 16)),
    ],
)
def test_old_and_new_spellings_of_the_rotary_embedding_mean_the_same(
    old: dict[str, Any], new: dict[str, Any], expected: RopeConfig
) -> None:
    assert config_from_hf({**LLAMA, **old}).rope == expected
    assert config_from_hf({**LLAMA, "rope_parameters": new}).rope == expected


def test_gemma3_takes_what_its_file_leaves_out_from_transformers_defaults() -> None:
    config = config_from_hf(GEMMA3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == RopeConfig(1_000_000.0, 256)
    assert config.local_rope == RopeConfig(10_000.0, 256)
    assert config.layer_windows == (512, 512, 512, 512, 512, None, 512)
    assert config.rope_of_layer(0) == config.local_rope
    assert config.rope_of_layer(5) == config.rope
    assert config.query_scale == 256**-0.5
    assert config.embedding_scale == 8.0
    assert config.activation == "gelu_tanh"
    assert config.tie_word_embeddings
    assert config.has_qk_norm
    assert config.eos_token_ids == (1,)


def test_gemma3_scaling_is_for_the_layers_that_see_everything() -> None:
    old = config_from_hf({**GEMMA3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    new = config_from_hf(
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new
    assert old.rope.scaling == LinearScaling(8.0)
    assert old.local_rope is not None
    assert old.local_rope.scaling is None


def test_the_text_part_of_a_gemma3_that_sees_images() -> None:
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {"x": 1}}
    text = {key: value for key, value in GEMMA3.items() if key != "architectures"}
    config = config_from_hf({**outer, "text_config": text})
    assert config.hidden_size == 64
    assert config.eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, (64, 64)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None)),
        ("MistralForCausalLM", {}, (4096, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, (None, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64)),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (64, None),
        ),
        ("LlamaForCausalLM", {"sliding_window": 64}, (None, None)),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_hf({**LLAMA, "architectures": [architecture], **changes}).layer_windows == windows


def test_biases_by_architecture() -> None:
    qwen2 = config_from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.mlp_bias) == (True, False, False)
    llama = config_from_hf({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, (2,)), (2, [3, 2], (3, 2)), ([5, 6], 7, (7, 5, 6)), (None, None, ()), (None, 4, (4,))],
)
def test_the_ends_are_those_of_both_files(config_eos: Any, generation_eos: Any, expected: tuple[int, ...]) -> None:
    generation = None if generation_eos is None else {"eos_token_id": generation_eos}
    assert config_from_hf({**LLAMA, "eos_token_id": config_eos}, generation).eos_token_ids == expected


def test_model_type_is_enough_when_there_is_no_architecture() -> None:
    assert config_from_hf({**LLAMA, "architectures": None, "model_type": "mistral"}).architecture == "mistral"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": [], "model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"head_dim": 15}, "head dimension is 15"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor is None"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be larger"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "no full_attention"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "big"}, "sliding_window is 'big'"),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": "six"}, "sliding_window_pattern"),
    ],
)
def test_values_that_make_no_sense_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptFileError, match=named):
        config_from_hf({**LLAMA, **changes})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.sampled_from(["", "linear", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner),
    max_leaves=4,
)
KEYS = [
    *LLAMA, "head_dim", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "rope_scaling",
    "rope_parameters", "rope_theta", "text_config", "tie_word_embeddings", "quantization_config", "model_type",
    "sliding_window_pattern", "query_pre_attn_scalar", "rope_local_base_freq", "attention_bias", "hidden_activation",
    "original_max_position_embeddings", "partial_rotary_factor",
]  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, min_size=1, max_size=3),
    base=st.sampled_from([LLAMA, GEMMA3, {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}]),
    generation=st.none() | st.dictionaries(st.just("eos_token_id"), JSON_VALUES),
)
def test_whatever_a_config_says_it_is_read_or_refused(
    changes: dict[str, Any], base: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    with contextlib.suppress(ModelLoadError):
        config = config_from_hf({**base, **changes}, generation)
        assert len(config.layer_windows) == config.num_layers
