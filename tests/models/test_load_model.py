"""From a checkpoint to a model: what is refused, what is counted. No oracle needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import ConfigError, IncompleteWeightsError, UnsupportedModelError
from octavo.executor.load_model import load_model, load_model_config
from octavo.models.config_hf import config_from_hf
from octavo.models.registry import MODEL_CLASSES
from octavo.ops.reference import ReferenceOps
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from tests.models.harness import ModelHarness
from tests.models.test_config_hf import LLAMA

OPS = ReferenceOps()


@dataclass(frozen=True)
class FolderSource:
    path: Path
    kind: str = "folder"
    name: str = "tiny"


def checkpoint(folder: Path, without: str | None = None, **changes: Any) -> Checkpoint:
    """A random tiny model as transformers would save it."""
    config = {**LLAMA, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    model_config = config_from_hf({**LLAMA, **{key: changes[key] for key in changes if key != "architectures"}})
    generator = np.random.default_rng(0)
    shapes = MODEL_CLASSES[model_config.architecture].parameter_shapes(model_config)
    tensors = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors.pop(without or "", None)
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(FolderSource(folder))


def test_the_model_counts_its_bytes_and_reports_progress(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    progress: list[tuple[int, int]] = []
    model = load_model(OPS, source, on_progress=lambda done, total: progress.append((done, total)), max_positions=32)
    table_bytes = 32 * 16 * 4
    assert model.num_weight_bytes == source.weights_bytes + table_bytes
    assert progress == sorted(progress)
    assert progress[-1] == (source.weights_bytes, source.weights_bytes)


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    model = load_model(OPS, checkpoint(tmp_path, tie_word_embeddings=True), max_positions=32)
    untied = tmp_path / "untied"
    untied.mkdir()
    assert (
        load_model(OPS, checkpoint(untied), max_positions=32).num_weight_bytes - model.num_weight_bytes == 100 * 64 * 4
    )


def test_the_rotary_table_never_exceeds_what_the_model_allows(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, max_position_embeddings=16)
    harness = ModelHarness(OPS, load_model(OPS, source, max_positions=1_000_000))
    assert harness.logits_of([1, 2, 3]).shape == (3, 100)
    assert load_model(OPS, source).num_weight_bytes == harness.model.num_weight_bytes


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(IncompleteWeightsError, match=rf"1 of 21 parameters are missing: {name}"):
        load_model(OPS, checkpoint(tmp_path, without=name))


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int3"):
        load_model(OPS, checkpoint(tmp_path), "int3")


def test_remote_code_is_refused_with_the_option_and_with_the_truth(tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    source = checkpoint(tmp_path, architectures=["NewForCausalLM"], auto_map=auto_map)
    with pytest.raises(UnsupportedModelError, match=r"NewForCausalLM.* needs --trust-remote-code"):
        load_model_config(source)
    with pytest.raises(UnsupportedModelError, match=r"runs no model code from checkpoints today.*llama, mistral"):
        load_model_config(source, trust_remote_code=True)


def test_an_unknown_architecture_without_code_is_just_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="NewForCausalLM is not one that Octavo has"):
        load_model(OPS, checkpoint(tmp_path, architectures=["NewForCausalLM"]))
