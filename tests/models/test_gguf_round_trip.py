"""The same tiny model as a Hugging Face folder and as a GGUF file: the same logits, to the bit."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelLoadError
from octavo.executor.load_model import load_model
from octavo.models.registry import DecoderModel
from octavo.models.rope import LinearScaling, Llama3Scaling, RopeConfig
from octavo.ops.reference import ReferenceOps
from octavo.weights.checkpoint import open_checkpoint
from tests.models.harness import ModelHarness
from tests.models.tiny_checkpoints import CONFIGS, expected_logits, make_model, random_prompt, save, torch
from tests.weights.gguf_files import gguf, write_gguf

OPS = ReferenceOps()
PROMPT = random_prompt(19)
# GGUF has no field for a Mistral's or Qwen2's windows; biases of o and the MLP are not in llama.cpp's llama either.
NAMES = [name for name in CONFIGS if name not in ("qwen2-windows", "gemma3-scaled-rope", "llama-biases")]


@dataclass(frozen=True)
class Source:
    path: Path
    kind: str
    name: str = "tiny"


def load(path: Path, dtype: str = "auto") -> DecoderModel:
    return load_model(OPS, open_checkpoint(Source(path, "gguf" if path.is_file() else "folder")), dtype)


def gguf_metadata(ours: DecoderModel, name: str) -> dict[str, Any]:
    config = ours.config
    keys = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
    }
    if isinstance(config.rope.scaling, LinearScaling):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.scaling.factor}
    windows = [window for window in config.layer_windows if window is not None]
    if windows:
        keys["attention.sliding_window"] = windows[0]
    if config.architecture == "gemma3":
        keys["attention.sliding_window_pattern"] = [window is not None for window in config.layer_windows]
    return {f"{name}.{key}": value for key, value in keys.items()}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's order of the rows of q and k to that of GGUF's llama."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_tensors(theirs: Any, ours: DecoderModel, name: str) -> dict[str, np.ndarray]:
    layer_names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "post_attention_norm" if name == "gemma3" else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    top_names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    config = ours.config
    tensors: dict[str, np.ndarray] = {}
    for full_name, tensor in theirs.state_dict().items():
        stem, kind = full_name.rsplit(".", 1)
        values = tensor.numpy()
        if config.tie_word_embeddings and stem == "lm_head":
            continue
        if name == "gemma3" and stem.endswith("norm"):
            values = values + np.float32(1)
        if name == "llama" and (match := re.search(r"\.([qk])_proj$", stem)):
            values = interleave(values, config.num_heads if match[1] == "q" else config.num_kv_heads)
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
            tensors[f"blk.{match[1]}.{layer_names[match[2]]}.{kind}"] = values
        else:
            tensors[f"{top_names[stem]}.{kind}"] = values
    if isinstance(config.rope.scaling, Llama3Scaling):
        plain = RopeConfig(config.rope.theta, config.rope.rotary_dim).inverse_frequencies()
        tensors["rope_freqs.weight"] = (plain / config.rope.inverse_frequencies()).astype(np.float32)
    return tensors


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_gives_the_bits_of_the_folder_it_was_made_from(name: str, tmp_path: Path) -> None:
    theirs = make_model(CONFIGS[name]())
    ours = load(save(theirs, tmp_path / "folder"))
    architecture = "llama" if name.startswith("mistral") else ours.config.architecture
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture,
        gguf_metadata(ours, architecture),
        tensors=gguf_tensors(theirs, ours, architecture),
    )
    from_gguf = load(path)
    expected, got = ModelHarness(OPS, ours).logits_of(PROMPT), ModelHarness(OPS, from_gguf).logits_of(PROMPT)
    if isinstance(ours.config.rope.scaling, Llama3Scaling):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)  # the divisors are stored as float32
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_quantized_file_is_the_model_whose_weights_it_stores(type_name: str, dtype: str, tmp_path: Path) -> None:
    theirs = make_model(CONFIGS["llama-gqa-tied"]())
    ours = load(save(theirs, tmp_path / "folder"))
    kind = gguf.GGMLQuantizationType[type_name]
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 2:
                parameter.copy_(
                    torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind))
                )
    tensors = gguf_tensors(theirs, ours, "llama")
    matrices = {
        name: (gguf.quants.quantize(values, kind), type_name) for name, values in tensors.items() if values.ndim == 2
    }
    vectors = {name: values for name, values in tensors.items() if values.ndim == 1}
    path = write_gguf(
        tmp_path / "model.gguf", "llama", gguf_metadata(ours, "llama"), tensors=vectors, quantized=matrices
    )
    got = ModelHarness(OPS, load(path, dtype)).logits_of(PROMPT)
    np.testing.assert_allclose(got, expected_logits(theirs, PROMPT), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("llama")
    theirs = make_model(CONFIGS["llama-llama3-rope"]())
    ours = load(save(theirs, folder / "folder"))
    tensors = gguf_tensors(theirs, ours, "llama")
    return write_gguf(folder / "model.gguf", "llama", gguf_metadata(ours, "llama"), tensors=tensors).read_bytes()


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 3500), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_model_file_with_a_damaged_head_is_loaded_or_refused(
    edits: list[tuple[int, int]], llama_file: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(llama_file)
    for position, byte in edits:
        damaged[position] = byte
    path = tmp_path_factory.getbasetemp() / "damaged-model.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelLoadError):
        model = load_model(OPS, open_checkpoint(Source(path, "gguf")), max_positions=64)
        assert model.num_weight_bytes > 0
