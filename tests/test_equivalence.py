"""Bit-identical answers, whatever the engine does besides: the promise that Octavo is built around.

Twelve prompts on the real SmolLM2, greedy and seeded, with log-probabilities, must give the same bits: alone, together,
in small chunks, with the prefix cache off, cold and warm, and in a pool so small that sequences are preempted. Once
with the cache in 16-bit floats and once in 8-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import LLM, SamplingParams

NUM_TOKENS = 40
MAX_MODEL_LEN = 2048
Answer = tuple[list[int], list[dict[int, float]]]


def prompts_of(golden: dict[str, Any]) -> list[list[int]]:
    return [case["prompt_token_ids"] for case in golden["cases"]]


def params_of(num_prompts: int) -> list[SamplingParams]:
    """Every second one greedy, the others drawn with a seed and filters of their own."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True)
    return [
        greedy
        if index % 2 == 0
        else SamplingParams(
            temperature=0.8, top_p=0.95, seed=index, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True,
            repetition_penalty=1.1 if index % 3 == 0 else 1.0,
        )
        for index in range(num_prompts)
    ]  # fmt: skip


def answers(outputs: list[Any]) -> list[Answer]:
    """Token ids and every reported log-probability, as exact floats."""
    return [
        (
            list(output.outputs[0].token_ids),
            [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def run(engine: LLM, prompts: list[list[int]]) -> list[Answer]:
    return answers(engine.generate(prompts, params_of(len(prompts)), use_tqdm=False))


@pytest.fixture(scope="module")
def prompts(golden_smollm2: Any) -> list[list[int]]:
    return prompts_of(golden_smollm2)


@pytest.fixture(scope="module", params=["auto", "int8"])
def start(request: pytest.FixtureRequest, smollm2_gguf: Any) -> Callable[..., LLM]:
    """start(**options) -> an engine of the model, its cache in the format of this run."""
    defaults = {"model": str(smollm2_gguf), "max_model_len": MAX_MODEL_LEN, "kv_cache_dtype": request.param}
    return lambda **options: LLM(**(defaults | options))


@pytest.fixture(scope="module")
def alone(start: Callable[..., LLM], prompts: list[list[int]]) -> list[Answer]:
    """Each prompt by itself, with nothing cached."""
    engine = start(enable_prefix_caching=False)
    params = params_of(len(prompts))
    outputs = [engine.generate([p], [s], use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    return answers(outputs)


def test_all_at_once(start: Callable[..., LLM], prompts: list[list[int]], alone: list[Answer]) -> None:
    assert run(start(enable_prefix_caching=False), prompts) == alone


def test_chunks_of_32_tokens(start: Callable[..., LLM], prompts: list[list[int]], alone: list[Answer]) -> None:
    assert run(start(max_num_batched_tokens=32, max_num_seqs=16), prompts) == alone


def test_prefix_cache_cold_and_warm(start: Callable[..., LLM], prompts: list[list[int]], alone: list[Answer]) -> None:
    engine = start(enable_prefix_caching=True)
    assert run(engine, prompts) == alone
    warm = engine.generate(prompts, params_of(len(prompts)), use_tqdm=False)
    assert sum(output.num_cached_tokens for output in warm) > 1000
    assert answers(warm) == alone


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_pool_so_small_that_sequences_are_preempted(
    start: Callable[..., LLM], prompts: list[list[int]], alone: list[Answer], enable_prefix_caching: bool
) -> None:
    # The prompts take 94 blocks, so that all are admitted; what they generate needs some 30 more.
    block_bytes = start().config.ledger.block_bytes
    engine = start(
        max_model_len=1200, kv_cache_memory_bytes=96 * block_bytes, enable_prefix_caching=enable_prefix_caching
    )
    assert run(engine, prompts) == alone
    assert engine.stats().num_preemptions_total > 0


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(
    start: Callable[..., LLM], prompts: list[list[int]], alone: list[Answer], threads: int
) -> None:
    assert run(start(threads=threads), prompts) == alone


def test_prompt_logprobs_are_those_of_generation_and_the_same_from_a_warm_cache(
    start: Callable[..., LLM], prompts: list[list[int]], alone: list[Answer]
) -> None:
    """What was generated greedily, given as a prompt, scores the same bits, in every way to compute it."""
    generated = alone[0][0]
    prompt = [*prompts[0], *generated]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    found = []
    for options in ({}, {"max_num_batched_tokens": 32, "max_num_seqs": 16}, {"enable_prefix_caching": False}):
        engine = start(**options)
        for neighbours in ([], [prompts[1], prompts[2]]):
            output = engine.generate([prompt, *neighbours], params, use_tqdm=False)[0]
            assert output.num_cached_tokens == 0
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            found.append([{t: e.logprob for t, e in entry.items()} for entry in output.prompt_logprobs[1:] if entry])
    assert [len(entries) for entries in found] == [len(prompt) - 1] * len(found)
    assert all(entries == found[0] for entries in found)
    assert [next(iter(entry)) for entry in found[0]] == prompt[1:]
    assert found[0][-NUM_TOKENS:] == alone[0][1]
