"""Tiny random models of every architecture with adapters that PEFT made, and the real SmolLM2: the log-probabilities
of transformers + PEFT in float32.

The tiny models are float32 checkpoints, SmolLM2 its GGUF file with --dtype float32: the base's weights are the same
float32 numbers on both sides, and the adapters stay float32.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.executor.local import LocalExecutor
from octavo.weights.source import ModelSource, resolve_source
from tests.lora.adapters import ALL_PROJECTIONS, Scorer, random_tensors, save_adapter
from tests.models.tiny_checkpoints import CONFIGS, make_model, random_prompt, save, torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    peft = pytest.importorskip("peft", reason="PEFT is the oracle of these tests; pip install 'octavo[oracle]'")

# PEFT asks transformers for a name that it deprecated, and says what it thinks of a base without a model card.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora"

# The limit; float32 on both sides differs by about 1e-5.
TOLERANCE = 0.005

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a small green frog who lived in a pond.",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 = 8, and 5 + 5 =",
    "How do I build a wheel? Run the build command in the root of the repository.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY name;",
    "To be, or not to be, that is the question:",
    "The mitochondria are the powerhouse of the cell.",
    "Dear Sir or Madam, I am writing to ask about the flat that you offer.",
)


def expected_logprobs(model: Any, prompt: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()


def with_adapter(base: Any, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(base, folder).eval()


def randomize(model: Any, seed: int) -> None:
    """LoRA's B begins at zero; give it numbers that change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.5 * noise / parameter.shape[1] ** 0.5)


LORA_CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": list(ALL_PROJECTIONS)},
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 4, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["k_proj", "down_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"o_proj": 7, r"layers\.1\.mlp\.down_proj": 1, r"^model\.layers\.0\.self_attn\.q_proj": 2},
        "alpha_pattern": {"gate_proj": 3, r".*\.2\.self_attn\..*": 5},
    },
    "layers": {"r": 5, "target_modules": list(ALL_PROJECTIONS), "layers_to_transform": [0, 2]},
    "regex": {"r": 2, "target_modules": r".*layers\.1\.(mlp\.(gate|up)_proj|self_attn\.o_proj)"},
}


@pytest.mark.parametrize("architecture", ["llama", "llama-biases", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_tiny_models_with_adapters_say_what_peft_says(architecture: str, tmp_path: Path) -> None:
    base = make_model(CONFIGS[architecture]())
    save(base, tmp_path / "base")
    args = EngineArgs(model="tiny", dtype="float32", enable_lora=True, max_cpu_loras=8, kv_cache_memory_bytes=2**24)
    executor = LocalExecutor.load(args, ModelSource(path=tmp_path / "base", kind="folder", name="tiny"))
    prompts = [random_prompt(length, seed) for seed, length in enumerate((3, 19, 8, 30, 12, 25, 7, 16))]
    expected = [expected_logprobs(base, prompts[0])]
    for index, (name, settings) in enumerate(LORA_CONFIGS.items(), 1):
        wrapped = peft.get_peft_model(make_model(CONFIGS[architecture]()), peft.LoraConfig(**settings))
        randomize(wrapped, index)
        wrapped.save_pretrained(tmp_path / name)
        report = executor.load_adapter(index, str(tmp_path / name))
        assert report.rank == max(settings["r"], *settings.get("rank_pattern", {"": 0}).values())
        expected.append(expected_logprobs(wrapped.eval(), prompts[index]))
    scorer = Scorer(executor)
    ids = list(range(len(prompts)))
    together, chunked = scorer.score(prompts, ids), scorer.score(prompts, ids, chunk=5)
    for index, prompt in enumerate(prompts):
        (alone,) = scorer.score([prompt], [index])
        (base_alone,) = scorer.score([prompt], [0])
        assert np.abs(np.array(alone) - expected[index]).max() < 1e-3
        assert together[index] == chunked[index] == alone
        assert (base_alone == alone) == (index == 0)


def import_example() -> Any:
    spec = importlib.util.spec_from_file_location("lora_example", EXAMPLE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[Any, Any]:
    """transformers' model of the GGUF file's weights in float32, and its tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, tokenizer = import_example().load_base(str(smollm2_gguf))
    return model.eval(), tokenizer


def load_smollm2(path: Path) -> LocalExecutor:
    args = EngineArgs(
        model=str(path), dtype="float32", enable_lora=True, max_loras=12, kv_cache_memory_bytes=2**27, max_model_len=512
    )
    return LocalExecutor.load(args, resolve_source(str(path)))


def test_smollm2_with_adapters_says_what_peft_says(smollm2: Any, smollm2_gguf: Path, tmp_path: Path) -> None:
    """Ranks 1, 8, 16 and 64, each alone and in a batch with 8 other adapters and rows of the base model."""
    base, tokenizer = smollm2
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    executor = load_smollm2(smollm2_gguf)
    scorer = Scorer(executor)
    for index, rank in enumerate((1, 8, 16, 64, 4, 4, 4, 4, 4, 4, 4, 4), 1):
        tensors = random_tensors(executor.model_config, rank, seed=index, size=0.2)
        save_adapter(tmp_path / str(index), tensors, lora_alpha=2 * rank)
        executor.load_adapter(index, str(tmp_path / str(index)))
    for index in (1, 2, 3, 4):
        model = with_adapter(base, tmp_path / str(index))
        expected = [expected_logprobs(model, prompt) for prompt in prompts]
        base = model.unload()
        for position, prompt in enumerate(prompts):
            (alone,) = scorer.score([prompt], [index])
            assert np.abs(np.array(alone) - expected[position]).max() < TOLERANCE
            # Around it 8 adapters and two rows of the base model.
            around = [prompts[(position + 1 + i) % len(prompts)] for i in range(10)]
            batch = scorer.score([*around[:5], prompt, *around[5:]], [0, 5, 6, 7, 8, index, 9, 10, 11, 12, 0])
            assert batch[5] == alone
    (plain,) = scorer.score([prompts[0]], [0])
    assert np.abs(np.array(plain) - expected_logprobs(base, prompts[0])).max() < TOLERANCE


def test_the_example_s_adapter_says_what_peft_says(smollm2: Any, smollm2_gguf: Path, tmp_path: Path) -> None:
    """Trained for a few steps of its thirty, which is enough to answer otherwise than the base."""
    base, tokenizer = smollm2
    example = import_example()
    losses: list[float] = []
    model = example.train(
        base, tokenizer, EXAMPLE / "repobot.jsonl", num_steps=4, on_step=lambda _, loss: losses.append(loss)
    )
    model.save_pretrained(tmp_path / "trained")
    assert losses[-1] < losses[0]
    token_ids, labels = example.make_batch(
        tokenizer,
        [
            (each["question"], each["answer"])
            for each in map(json.loads, (EXAMPLE / "repobot.jsonl").read_text(encoding="utf-8").splitlines())
        ],
    )
    ends = (labels != -100).int().cumsum(1).argmax(1) + 1
    prompts = [row[:end].tolist() for row, end in zip(token_ids, ends, strict=True)]
    assert len(prompts) == 10
    scorer = Scorer(load_smollm2(smollm2_gguf))
    scorer.executor.load_adapter(1, str(tmp_path / "trained"))
    for index in range(2, 10):
        save_adapter(tmp_path / str(index), random_tensors(scorer.executor.model_config, 4, seed=index, size=0.2))
        scorer.executor.load_adapter(index, str(tmp_path / str(index)))
    expected = [expected_logprobs(model, prompt) for prompt in prompts]
    model.unload()
    for position, prompt in enumerate(prompts):
        (alone,) = scorer.score([prompt], [1])
        assert np.abs(np.array(alone) - expected[position]).max() < TOLERANCE
        around = [prompts[(position + 1 + i) % len(prompts)] for i in range(10)]
        assert scorer.score([*around[:4], prompt, *around[4:]], [2, 3, 4, 5, 1, 6, 7, 8, 9, 0, 0])[4] == alone
        assert np.mean(alone) > np.mean(scorer.score([prompt], [0])[0])
