"""Reading adapters: what is right is read as PEFT means it, and each thing that is wrong is refused with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import (
    CorruptFileError,
    IncompleteWeightsError,
    ModelLoadError,
    ModelSourceError,
    UnsupportedModelError,
)
from octavo.lora.adapter import LoraMatrices, pack_matrices
from octavo.lora.peft import read_peft
from octavo.ops.interface import BFloat16
from tests.executor.tiny_model import make_model_config
from tests.lora.adapters import ALL_PROJECTIONS, random_tensors, save_adapter

CONFIG = make_model_config()
PREFIX = "base_model.model.model.layers"
Tensors = dict[str, np.ndarray]


def read(folder: Path) -> Any:
    return read_peft(folder, CONFIG, max_rank=16)


def tensors(rank: int = 4, **options: Any) -> Tensors:
    return random_tensors(CONFIG, rank, **options)


def test_all_projections_of_all_layers_are_read(tmp_path: Path) -> None:
    written = tensors()
    adapter = read(save_adapter(tmp_path, written, lora_alpha=6))
    assert adapter.target_modules == ALL_PROJECTIONS
    assert adapter.rank == 4
    assert adapter.base_model_name == "a/base"
    assert len(adapter.matrices) == 2 * len(ALL_PROJECTIONS)
    matrices = adapter.matrices[1, "down_proj"]
    assert np.array_equal(matrices.down, written[f"{PREFIX}.1.mlp.down_proj.lora_A.weight"])
    assert np.array_equal(matrices.up, written[f"{PREFIX}.1.mlp.down_proj.lora_B.weight"])
    assert matrices.scale == 1.5


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    adapter = read(save_adapter(tmp_path, tensors(), lora_alpha=6, use_rslora=True))
    assert {matrices.scale for matrices in adapter.matrices.values()} == {3.0}


def test_patterns_give_modules_a_rank_and_an_alpha_of_their_own(tmp_path: Path) -> None:
    written = tensors(targets=("q_proj", "o_proj")) | tensors(rank=2, targets=("q_proj",), layers=[1])
    settings = {"r": 4, "lora_alpha": 8, "rank_pattern": {r"layers\.1\..*q_proj": 2}, "alpha_pattern": {"o_proj": 4}}
    adapter = read(save_adapter(tmp_path, written, **settings))
    found = {module: (matrices.rank, matrices.scale) for module, matrices in adapter.matrices.items()}
    assert found == {
        (0, "q_proj"): (4, 2.0), (1, "q_proj"): (2, 4.0), (0, "o_proj"): (4, 1.0), (1, "o_proj"): (4, 1.0)
    }  # fmt: skip


def test_some_layers_only(tmp_path: Path) -> None:
    adapter = read(save_adapter(tmp_path, tensors(layers=[1]), layers_to_transform=[1]))
    assert {layer for layer, _ in adapter.matrices} == {1}


def test_fused_projections_and_other_prefixes(tmp_path: Path) -> None:
    written = tensors(targets=("qkv_proj", "gate_up_proj"))
    renamed = {name.replace("base_model.model.", ""): values for name, values in written.items()}
    assert read(save_adapter(tmp_path / "a", renamed)).target_modules == ("qkv_proj", "gate_up_proj")
    language = {name.replace(".model.layers", ".model.language_model.layers"): each for name, each in written.items()}
    assert read(save_adapter(tmp_path / "b", language)).rank == 4


# --- what is refused -----------------------------------------------------------------------------------------------

VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "biases"),
    ({"bias": "lora_only"}, "biases"),
    ({"lora_bias": True}, "biases"),
    ({"trainable_token_indices": [1, 2]}, "embeddings"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
    ({"target_parameters": ["experts.gate"]}, "target_parameters"),
    ({"alora_invocation_tokens": [5]}, "activated LoRA"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
]


@pytest.mark.parametrize(("settings", "named"), VARIANTS, ids=str)
def test_variants_are_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(save_adapter(tmp_path, tensors(), **settings))


EXTRA_TENSORS: list[tuple[str, str]] = [
    (f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
    ("base_model.model.lm_head.weight", "modules_to_save"),
    (f"{PREFIX}.0.input_layernorm.weight", "modules_to_save"),
    ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
    ("base_model.model.lm_head.lora_A.weight", "output head"),
    (f"{PREFIX}.0.self_attn.q_proj.bias", "biases"),
    (f"{PREFIX}.0.self_attn.q_proj.lora_B.bias", "biases"),
    (f"{PREFIX}.0.block_sparse_moe.gate.lora_A.weight", "block_sparse_moe.gate"),
    ("base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", "vision_tower"),
    (f"{PREFIX}.0.mlp.q_proj.lora_A.weight", "mlp.q_proj"),
]


@pytest.mark.parametrize(("name", "named"), EXTRA_TENSORS)
def test_tensors_that_are_no_adapter_of_a_projection_are_refused_by_name(name: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(save_adapter(tmp_path, tensors() | {name: np.zeros((4, 32), np.float32)}))


def test_another_base_s_shapes_are_refused_with_both(tmp_path: Path) -> None:
    written = tensors()
    written[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 48), np.float32)
    with pytest.raises(UnsupportedModelError, match=r"q_proj is for a weight of \[32, 48\].* \[32, 32\].*another base"):
        read(save_adapter(tmp_path, written))


def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    moved = {name.replace("layers.1.", "layers.7."): values for name, values in tensors().items()}
    with pytest.raises(UnsupportedModelError, match=r"layer 7.* 2 layers.*another base"):
        read(save_adapter(tmp_path, moved))


def test_a_rank_over_the_limit_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rank 17, but at most 16.*--max-lora-rank 17"):
        read(save_adapter(tmp_path, tensors(17)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    written = tensors()
    written[f"{PREFIX}.1.mlp.up_proj.lora_B.weight"][3, 1] = value
    with pytest.raises(CorruptFileError, match=r"lora_B of model\.layers\.1\.mlp\.up_proj.*not finite"):
        read(save_adapter(tmp_path, written))


def remove_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def leave_a_pickle(folder: Path) -> None:
    remove_weights(folder)
    (folder / "adapter_model.bin").write_bytes(b"x")


def truncate_weights(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def empty_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


def break_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")


def list_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]", encoding="utf-8")


DAMAGES: list[tuple[Callable[[Path], None], type[ModelLoadError], str]] = [
    (remove_config, ModelSourceError, "adapter_config.json"),
    (remove_weights, ModelSourceError, "has no adapter_model.safetensors"),
    (leave_a_pickle, ModelSourceError, "pickle"),
    (truncate_weights, CorruptFileError, "truncated"),
    (empty_weights, CorruptFileError, "empty"),
    (break_config, CorruptFileError, "not JSON"),
    (list_config, CorruptFileError, "not a JSON object"),
]


@pytest.mark.parametrize(("damage", "error", "named"), DAMAGES)
def test_missing_and_damaged_files_are_named(
    damage: Callable[[Path], None], error: type[ModelLoadError], named: str, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, tensors())
    damage(folder)
    with pytest.raises(error, match=named):
        read(folder)


@pytest.mark.parametrize("settings", [{"r": 5}, {"r": "4"}, {"r": 0}, {"lora_alpha": None}, {"lora_alpha": "8"}])
def test_settings_that_do_not_fit_the_matrices_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"rank|lora_alpha"):
        read(save_adapter(tmp_path, tensors(), **settings))


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    written = tensors()
    del written[f"{PREFIX}.0.mlp.down_proj.lora_B.weight"]
    with pytest.raises(IncompleteWeightsError, match=r"layers\.0\.mlp\.down_proj"):
        read(save_adapter(tmp_path, written))


def test_modules_that_the_settings_name_and_the_file_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteWeightsError, match=r"layers\.1\.mlp\.down_proj.* and 3 more"):
        read(save_adapter(tmp_path, tensors(layers=[0])))


def test_an_adapter_without_matrices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteWeightsError, match="no LoRA matrices"):
        read(save_adapter(tmp_path, {}))


def test_a_fused_projection_and_its_part_cannot_both_be_there(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="part of it"):
        read(save_adapter(tmp_path, tensors(targets=("qkv_proj", "q_proj"))))


# --- how they are kept ---------------------------------------------------------------------------------------------


def test_float32_is_kept_in_float16_with_as_many_bits_however_small_or_large() -> None:
    rng = np.random.default_rng(0)
    down = (rng.standard_normal((4, 64)) * 1e6).astype(np.float32)
    up = (rng.standard_normal((32, 4)) * 1e-8).astype(np.float32)
    packed = pack_matrices(LoraMatrices(down, up, 0.5), keeps_float32=False)
    assert isinstance(packed.down, np.ndarray)
    assert isinstance(packed.up, np.ndarray)
    assert packed.down.dtype == packed.up.dtype == np.float16
    got = packed.scale * (packed.up.astype(np.float64) @ packed.down.astype(np.float64))
    expected = 0.5 * (up.astype(np.float64) @ down.astype(np.float64))
    assert np.abs(got - expected).max() < 4 * 2**-11 * np.abs(expected).max()


def test_16_bit_floats_and_float32_that_is_to_stay_are_kept_as_they_are() -> None:
    halves = LoraMatrices(np.ones((2, 8), np.float16), np.ones((8, 2), np.float16), 1.0)
    assert pack_matrices(halves, keeps_float32=False) is halves
    bits = BFloat16(np.full((2, 8), 0x3F80, np.uint16))
    bfloats = LoraMatrices(bits, BFloat16(np.full((8, 2), 0x3F80, np.uint16)), 1.0)
    assert pack_matrices(bfloats, keeps_float32=False) is bfloats
    floats = LoraMatrices(np.ones((2, 8), np.float32), np.ones((8, 2), np.float32), 1.0)
    assert pack_matrices(floats, keeps_float32=True).down.dtype == np.float32
    mixed = pack_matrices(LoraMatrices(bits, np.ones((8, 2), np.float32), 1.0), keeps_float32=False)
    assert mixed.down.dtype == mixed.up.dtype == np.float16


def test_a_config_may_have_settings_we_do_not_know(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, tensors(), lora_dropout=0.1, something_new=None)
    assert json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["something_new"] is None
    assert read(folder).rank == 4
