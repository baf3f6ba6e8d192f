"""Whole tiny models from checkpoints in codes, against the same model from the exact floats; and float checkpoints that
are packed at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import CorruptFileError, IncompleteWeightsError, UnsupportedModelError
from octavo.executor.load_model import load_model
from octavo.models.config_hf import config_from_hf
from octavo.models.registry import MODEL_CLASSES
from octavo.ops.interface import Ops
from octavo.ops.reference import ReferenceOps
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.load import estimate_weights_bytes
from tests.models.backends import BACKENDS, make_ops
from tests.models.harness import ModelHarness
from tests.models.test_config_hf import LLAMA
from tests.models.test_load_model import FolderSource
from tests.weights.stored_weights import Format, awq, compressed_tensors, gptq

OPS = ReferenceOps()
CONFIG = {**LLAMA, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "tie_word_embeddings": False}
PROMPT = [5, 17, 99, 3, 42, 8, 0, 61]

FORMATS: dict[str, Format] = {
    "gptq-4-g32": gptq(4, 32),
    "gptq-4-g128-sym": gptq(4, 128, symmetric=True),
    "gptq-8-row": gptq(8, -1, version=2),
    "awq-g64": awq(64),
    "awq-g128": awq(128),
    "ct-packed-4-g128": compressed_tensors(4, 128),
    "ct-packed-4-asym": compressed_tensors(4, 64, symmetric=False),
    "ct-packed-8-channel": compressed_tensors(8, -1),
    "ct-int8-channel": compressed_tensors(8, -1, packed=False),
    "ct-int8-asym": compressed_tensors(8, 32, symmetric=False, packed=False),
}


def save(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(FolderSource(folder))


def save_both(folder: Path, stored: Format, **config: Any) -> tuple[Checkpoint, Checkpoint]:
    """The model in codes, and the one of the floats that the codes stand for. Embedding, head and norms are floats."""
    generator = np.random.default_rng(0)
    shapes = MODEL_CLASSES["llama"].parameter_shapes(config_from_hf(CONFIG))
    codes: dict[str, np.ndarray] = {}
    floats: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if "_proj" in name:
            parts, floats[name] = stored.make(generator, *shape)
            codes |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        else:
            floats[name] = codes[name] = generator.normal(size=shape).astype(np.float16).astype(np.float32)
    quantized = save(folder / "codes", codes, quantization_config={**stored.config, **config})
    return quantized, save(folder / "floats", floats)


def logits(checkpoint: Checkpoint, ops: Ops = OPS, **options: Any) -> np.ndarray:
    return ModelHarness(ops, load_model(ops, checkpoint, **options)).logits_of(PROMPT)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_other_programs_give_the_logits_of_the_floats_they_stand_for(name: str, tmp_path: Path) -> None:
    quantized, floats = save_both(tmp_path, FORMATS[name])
    assert quantized.quantization == FORMATS[name].config["quant_method"]
    assert quantized.tensor_shapes == {key: quantized.tensor_shapes[key] for key in floats.tensor_shapes}
    assert quantized.weights_bytes < floats.weights_bytes
    expected = logits(floats)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(quantized), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits(quantized, dtype="float32"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_stay_in_their_codes_on_every_backend(backend: str, tmp_path: Path) -> None:
    ops = make_ops(backend)
    model = load_model(ops, save_both(tmp_path, awq(128))[0])
    assert model.layers[0].mlp.down.weight.dtype == "q4"  # type: ignore[attr-defined]
    assert set(model.matrix_bytes) == {"4-bit", "float32"}
    vectors = sum(vector.size for vector in _vectors(model)) * 4
    tables = 512 * 32 * 4
    assert sum(model.matrix_bytes.values()) + vectors + tables == model.num_weight_bytes


def _vectors(model: Any) -> list[np.ndarray]:
    return [model.ends.norm] + [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)]


@pytest.mark.parametrize("stored", [gptq(4, 32, desc_act=True), compressed_tensors(4, 32, actorder="group")])
def test_an_activation_order_is_refused_with_the_ways_out_and_they_work(stored: Format, tmp_path: Path) -> None:
    quantized, floats = save_both(tmp_path, stored)
    with pytest.raises(UnsupportedModelError, match=r"down_proj.* activation order .*int8.*--dtype float32"):
        load_model(OPS, quantized)
    expected = logits(floats)
    np.testing.assert_allclose(logits(quantized, dtype="float32"), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        logits(quantized, quantization="int8"), logits(floats, quantization="int8"), rtol=0, atol=1e-5
    )


def test_a_dtype_reaches_the_matrices_that_are_floats_only(tmp_path: Path) -> None:
    model = load_model(OPS, save_both(tmp_path, gptq())[0], "bfloat16", quantization="checkpoint")
    assert set(model.matrix_bytes) == {"4-bit", "bfloat16"}


def test_empty_biases_of_gptq_files_are_overlooked_and_others_are_not(tmp_path: Path) -> None:
    stored = gptq()
    generator = np.random.default_rng(0)
    shapes = MODEL_CLASSES["llama"].parameter_shapes(config_from_hf(CONFIG))
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if "_proj" in name:
            tensors |= {f"{module}.{part}": tensor for part, tensor in stored.make(generator, *shape)[0].items()}
            tensors[f"{module}.bias"] = np.zeros(shape[0], np.float16)
        else:
            tensors[name] = np.ones(shape, np.float16)
    load_model(OPS, save(tmp_path, tensors, quantization_config=stored.config))
    tensors["model.layers.1.mlp.up_proj.bias"][3] = 1
    with pytest.raises(IncompleteWeightsError, match=r"1 tensors are no parameters .*layers\.1\.mlp\.up_proj\.bias"):
        load_model(OPS, save(tmp_path, tensors, quantization_config=stored.config))


def test_a_weight_shape_that_lies_is_corrupt(tmp_path: Path) -> None:
    quantized, _ = save_both(tmp_path, compressed_tensors())
    tensors = {name: np.asarray(quantized._folder.read_part(name)) for name in quantized.raw_tensor_shapes}  # type: ignore[attr-defined]
    tensors["model.layers.0.mlp.up_proj.weight_shape"] = np.array([192, 127], np.int64)
    folder = tmp_path / "again"
    broken = save(folder, tensors, quantization_config=compressed_tensors().config)
    with pytest.raises(CorruptFileError, match="weight_shape says"):
        load_model(OPS, broken)


# --- floats that are packed at load ---------------------------------------------------------------------------


def float_checkpoint(folder: Path, **changes: Any) -> Checkpoint:
    generator = np.random.default_rng(0)
    shapes = MODEL_CLASSES["llama"].parameter_shapes(config_from_hf({**CONFIG, **changes}))
    tensors = {name: (generator.normal(size=shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}
    return save(folder, tensors, **changes)


@pytest.mark.parametrize(
    ("quantization", "formats", "limit"), [("int8", {"8-bit"}, 0.03), ("int4", {"4-bit", "8-bit"}, 0.25)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float_weights_are_packed_and_stay_close(
    backend: str, quantization: str, formats: set[str], limit: float, tmp_path: Path
) -> None:
    ops, checkpoint = make_ops(backend), float_checkpoint(tmp_path)
    model = load_model(ops, checkpoint, quantization=quantization)
    assert set(model.matrix_bytes) == formats
    assert model.ends.table.dtype == "q8"  # type: ignore[attr-defined]
    expected = logits(checkpoint, quantization="none")
    got = ModelHarness(ops, model).logits_of(PROMPT)
    assert 0 < np.sqrt(np.mean((got - expected) ** 2)) / np.std(expected) < limit
    if backend == "cpu":
        estimate = estimate_weights_bytes(checkpoint, "auto", quantization)
        assert estimate == pytest.approx(sum(model.matrix_bytes.values()), rel=0.1)


def test_rows_that_32_does_not_divide_stay_floats(tmp_path: Path) -> None:
    model = load_model(OPS, float_checkpoint(tmp_path, intermediate_size=200), quantization="int8")
    assert model.layers[0].mlp.down.weight.dtype == "float32"  # type: ignore[attr-defined]
    assert model.layers[0].mlp.gate_up.weight.dtype == "q8"  # type: ignore[attr-defined]


def test_a_weight_that_is_no_finite_number_is_named_when_it_is_packed(tmp_path: Path) -> None:
    checkpoint = float_checkpoint(tmp_path)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensor_names}
    tensors["model.layers.1.mlp.up_proj.weight"][7, 7] = np.nan
    with pytest.raises(CorruptFileError, match=r"layers\.1\.mlp\.up_proj\.weight has weights that are not finite"):
        load_model(OPS, save(tmp_path / "nan", tensors), quantization="int8")
