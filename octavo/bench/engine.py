"""A model in this process for the offline measurements, through the public `LLM`; and the prompts it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from octavo import LLM, ConfigError, EngineArgs, SamplingParams
from octavo.executor.local import LocalExecutor
from octavo.weights.model_source import ModelSource

OnProgress = Callable[[str, int, int], None]  # (what is being done, how much is done, of how much or 0)


class LoadedModel:
    """executor: what the LLM computes with, to look inside"""

    def __init__(self, args: EngineArgs, on_progress: OnProgress, **stand_ins: Any):
        def load(args: EngineArgs, source: ModelSource, on_progress: OnProgress) -> LocalExecutor:
            self.executor = LocalExecutor.load(args, source, on_progress)
            return self.executor

        options = {name: getattr(args, name) for name in EngineArgs.__dataclass_fields__ if name != "model"}
        given = {name: value for name, value in options.items() if value is not None}
        self.llm = LLM(args.model, executor_factory=load, on_progress=on_progress, **given, **stand_ins)

    @property
    def name(self) -> str:
        return self.llm.report.served_model_names[0]

    @property
    def isa(self) -> str:
        return self.llm.report.isa

    @property
    def threads(self) -> int:
        return self.llm.report.threads

    @property
    def vocab_size(self) -> int:
        return self.llm.limits.vocab_size

    def make_prompts(self, rng: random.Random, num_prompts: int, num_tokens: int) -> list[dict[str, list[int]]]:
        """Random token ids, so that no prompt is in the prefix cache; from the middle of the vocabulary, where no
        special tokens are."""
        low, high = self.vocab_size // 4, self.vocab_size // 2
        return [{"prompt_token_ids": [rng.randrange(low, high) for _ in range(num_tokens)]} for _ in range(num_prompts)]

    def generate(self, prompts: Sequence[dict[str, list[int]]], max_tokens: int) -> None:
        """Greedy, to the full length whatever is generated."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.generate(list(prompts), params, use_tqdm=False)


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raises ConfigError."""
    if num_prompt_tokens + max_tokens > max_model_len:
        raise ConfigError(
            f"--prompt-tokens is {num_prompt_tokens} and --max-tokens {max_tokens}, but max_model_len is "
            f"{max_model_len}; use less, or a larger --max-model-len.",
            option="--prompt-tokens",
        )
