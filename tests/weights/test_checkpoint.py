"""Checkpoints: canonical names, row order and norm meaning, whatever the format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import CorruptFileError, ModelSourceError, UnsupportedModelError
from octavo.ops.interface import BFloat16, GroupQuantized
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from tests.weights.gguf_files import gguf, write_gguf


@dataclass(frozen=True)
class Source:
    path: Path
    kind: str
    name: str = "tiny"


def hf_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(Source(folder, "folder"))


def gguf_file(folder: Path, architecture: str, metadata: dict[str, Any], **contents: Any) -> Checkpoint:
    return open_checkpoint(Source(write_gguf(folder / "x.gguf", architecture, metadata, **contents), "gguf"))


def test_a_folder_shows_its_configs_and_tensors(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    weight = np.ones((2, 3), np.float16)
    checkpoint = hf_folder(tmp_path, {"model_type": "llama"}, {"model.embed_tokens.weight": weight})
    assert checkpoint.format == "safetensors"
    assert checkpoint.hf_config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.gguf_metadata is None
    assert checkpoint.tensor_names == ("model.embed_tokens.weight",)
    assert checkpoint.weights_bytes == 12


def test_a_llama_norm_is_what_is_stored_and_a_gemma3_norm_has_one_added(tmp_path: Path) -> None:
    norm = np.array([0.25, -0.5], np.float32)
    for model_type, expected in (("llama", norm), ("gemma3_text", norm + 1)):
        folder = tmp_path / model_type
        folder.mkdir()
        checkpoint = hf_folder(folder, {"model_type": model_type}, {"model.layers.0.self_attn.q_norm.weight": norm})
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_norm.weight"), expected)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_that_sees_images_has_the_names_of_a_text_model(prefix: str, tmp_path: Path) -> None:
    tensors = {f"{prefix}norm.weight": np.zeros(2, np.float32), "vision_tower.x.weight": np.zeros(2, np.float32)}
    checkpoint = hf_folder(tmp_path, {"model_type": "gemma3"}, tensors)
    assert checkpoint.tensor_names == ("model.norm.weight",)
    assert checkpoint.weights_bytes == 8


def test_gguf_names_become_hugging_face_names(tmp_path: Path) -> None:
    vector = np.ones(4, np.float32)
    names = ["token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_norm.weight"]
    names += ["blk.12.ffn_norm.weight", "blk.0.ffn_down.weight", "blk.0.attn_output.bias", "blk.0.odd.weight"]
    checkpoint = gguf_file(tmp_path, "llama", {}, tensors=dict.fromkeys(names, vector))
    assert checkpoint.format == "gguf"
    assert checkpoint.tensor_names == (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.12.post_attention_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "blk.0.odd.weight",
    )
    assert checkpoint.rope_divisors == (1.0, 1.0, 1.0, 1.0)
    assert checkpoint.hf_config is None
    assert checkpoint.gguf_metadata is not None


def test_the_four_norms_of_a_gemma3_layer_are_told_apart(tmp_path: Path) -> None:
    names = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    tensors = {f"blk.3.{name}.weight": np.full(2, index, np.float32) for index, name in enumerate(names)}
    checkpoint = gguf_file(tmp_path, "gemma3", {}, tensors=tensors)
    canonical = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"]
    for index, name in enumerate([*canonical, "post_feedforward_layernorm"]):
        # and nothing is added: the file's norms are full factors
        np.testing.assert_array_equal(checkpoint.read(f"model.layers.3.{name}.weight"), np.full(2, index))


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's order of rows to GGUF's, one row at a time."""
    head_dim = len(rows) // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for index in range(head_dim // 2):
            out[head * head_dim + 2 * index] = rows[head * head_dim + index]
            out[head * head_dim + 2 * index + 1] = rows[head * head_dim + head_dim // 2 + index]
    return out


_HEADS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
_QUERY, _KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_1", "Q5_0", "Q8_0"])
def test_rows_of_llama_queries_and_keys_come_in_hugging_face_order(type_name: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    stored, expected = {}, {}
    for name, canonical, num_heads, num_rows in (("attn_q", _QUERY, 4, 32), ("attn_k", _KEY, 2, 16)):
        rows = generator.normal(size=(num_rows, 64)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[type_name]
        stored[f"blk.0.{name}.weight"] = (gguf.quants.quantize(interleave(rows, num_heads), kind), type_name)
        expected[canonical] = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    checkpoint = gguf_file(tmp_path, "llama", _HEADS, quantized=stored)
    for canonical, values in expected.items():
        data = checkpoint.read(canonical)
        if isinstance(data, GroupQuantized):
            data = data.dequantize()
        if isinstance(data, BFloat16):
            data = data.to_float32()
        np.testing.assert_array_equal(data, values)
        np.testing.assert_array_equal(checkpoint.read(canonical, exact_float=True), values)


def test_rows_of_other_architectures_are_left_as_they_are(tmp_path: Path) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(16, 2)
    checkpoint = gguf_file(tmp_path, "qwen2", {}, tensors={"blk.0.attn_q.weight": rows})
    np.testing.assert_array_equal(checkpoint.read(_QUERY), rows)


def test_rows_that_the_heads_cannot_share_are_refused(tmp_path: Path) -> None:
    checkpoint = gguf_file(tmp_path, "llama", _HEADS, tensors={"blk.0.attn_q.weight": np.ones((12, 2), np.float32)})
    with pytest.raises(CorruptFileError, match=r"'blk.0.attn_q.weight' has 12 rows, which 4 heads"):
        checkpoint.read(_QUERY)


def test_a_part_of_a_split_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="one of 3 parts of a model; join them"):
        gguf_file(tmp_path, "llama", {"split.count": 3})


def test_folders_that_are_no_model_say_why(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"neither a config\.json nor a \.gguf file"):
        open_checkpoint(Source(tmp_path, "folder"))
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(ModelSourceError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        open_checkpoint(Source(tmp_path, "folder"))
    (tmp_path / "b.gguf").unlink()
    assert open_checkpoint(Source(tmp_path, "folder")).path == tmp_path / "a.gguf"


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_an_unreadable_config_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"config\.json: is not"):
        open_checkpoint(Source(tmp_path, "folder"))
