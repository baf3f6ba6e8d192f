"""Every architecture, tiny and random, against transformers; and against itself, cut and batched in other ways."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.executor.load_model import load_model
from octavo.models.registry import DecoderModel
from octavo.ops.interface import Ops
from octavo.weights.checkpoint import open_checkpoint
from tests.models.backends import BACKENDS, make_ops
from tests.models.harness import ModelHarness, PagedSequence
from tests.models.tiny_checkpoints import CONFIGS, expected_logits, make_model, random_prompt, save, torch, transformers

# Logits are of order 1 to 10. All sides compute in float32 or better: some hundred additions of order 1, each off by
# 6e-8, through three layers.
TOLERANCE = 1e-4

PROMPT = random_prompt(23)


@dataclass(frozen=True)
class FolderSource:
    path: Path
    kind: str = "folder"
    name: str = "tiny"


@dataclass(frozen=True)
class Case:
    """transformers' model, and ours on one backend"""

    theirs: Any
    ops: Ops
    ours: DecoderModel

    def harness(self, **options: Any) -> ModelHarness:
        return ModelHarness(self.ops, self.ours, **options)


def load(ops: Ops, folder: Path) -> DecoderModel:
    return load_model(ops, open_checkpoint(FolderSource(folder)))


@pytest.fixture(scope="module", params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest, ops: Ops, tmp_path_factory: pytest.TempPathFactory) -> Case:
    theirs = make_model(CONFIGS[request.param]())
    return Case(theirs, ops, load(ops, save(theirs, tmp_path_factory.mktemp(request.param))))


def test_prefill_gives_the_logits_of_transformers(case: Case) -> None:
    expected = expected_logits(case.theirs, PROMPT)
    assert np.abs(expected).max() > 1.0, "the tiny model is too tame to test anything"
    np.testing.assert_allclose(case.harness().logits_of(PROMPT), expected, rtol=0, atol=TOLERANCE)


def test_chunks_and_decode_steps_give_the_same_bits_as_one_prefill(case: Case) -> None:
    whole = case.harness().logits_of(PROMPT)
    in_chunks = case.harness(seed=1).logits_of(PROMPT, chunks=[3, 1, 7, 2, 6, 1, 1, 1, 1])
    np.testing.assert_array_equal(in_chunks, whole)


def test_neighbours_in_the_batch_change_no_bit(case: Case) -> None:
    prompts = [random_prompt(length, seed=length) for length in (9, 1, 17)]
    alone = [case.harness().logits_of(prompt) for prompt in prompts]
    harness = case.harness(seed=2)
    first, second, third = (PagedSequence(prompt) for prompt in prompts)
    parts: list[list[np.ndarray]] = [[], [], []]
    parts[2] += harness.step([third], [5])
    for index, logits in zip((0, 1, 2), harness.step([first, second, third], [8, 1, 11]), strict=True):
        parts[index].append(logits)
    for index, logits in zip((2, 0), harness.step([third, first], [1, 1]), strict=True):
        parts[index].append(logits)
    for expected, got in zip(alone, parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(got), expected)


def test_only_the_wanted_rows_get_logits(case: Case) -> None:
    harness = case.harness()
    whole = case.harness().logits_of(PROMPT)
    [last] = harness.step([PagedSequence(PROMPT)], [len(PROMPT)], only_last=True)
    assert last.shape == (1, case.ours.config.vocab_size)
    np.testing.assert_array_equal(last, whole[-1:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_half_precision_checkpoints_mean_what_transformers_reads(
    name: str, dtype: str, ops: Ops, tmp_path: Path
) -> None:
    ours = load(ops, save(make_model(CONFIGS[name]()).to(getattr(torch, dtype)), tmp_path))
    assert ours.ends.table.dtype == dtype
    # Read again as float32: a model that was halved in memory has halved its rotary frequencies too.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    expected = expected_logits(theirs, PROMPT)
    np.testing.assert_allclose(ModelHarness(ops, ours).logits_of(PROMPT), expected, rtol=0, atol=TOLERANCE)


def test_sharded_checkpoints_are_the_same_model(ops: Ops, tmp_path: Path) -> None:
    theirs = make_model(CONFIGS["llama"]())
    folder = save(theirs, tmp_path, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    np.testing.assert_allclose(
        ModelHarness(ops, load(ops, folder)).logits_of(PROMPT), expected_logits(theirs, PROMPT), rtol=0, atol=TOLERANCE
    )


def test_a_checkpoint_that_brings_code_for_an_architecture_we_have_is_just_loaded(ops: Ops, tmp_path: Path) -> None:
    theirs = make_model(CONFIGS["llama"]())
    config_path = save(theirs, tmp_path) / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"}}))
    assert load(ops, tmp_path).config.architecture == "llama"


def test_the_text_part_of_a_gemma3_that_sees_images_is_served(ops: Ops, tmp_path: Path) -> None:
    text = CONFIGS["gemma3"]()
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4, image_token_id=90
    )
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    text_model = make_model(text)
    whole.model.language_model.load_state_dict(text_model.model.state_dict())
    ours = load(ops, save(whole, tmp_path))
    np.testing.assert_allclose(
        ModelHarness(ops, ours).logits_of(PROMPT), expected_logits(text_model, PROMPT), rtol=0, atol=TOLERANCE
    )
