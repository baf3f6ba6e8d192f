"""The real models against transformers' float32 outputs (tests/golden): tokens, log-probabilities, and how far the
default weights format and an int8 cache are from float32."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from octavo import LLM, SamplingParams

MARGIN = 0.01  # where the reference's two best tokens are closer than this, either is right
LOGPROB_TOLERANCE = 0.005
MEAN_TOLERANCE_DEFAULT_FORMAT = 0.03
MEAN_TOLERANCE_INT8_CACHE = 0.02  # beside weights in float32; without their transform, keys alone would cost more


def float32_engine(path: Any) -> LLM:
    return LLM(model=str(path), dtype="float32", kv_cache_dtype="float32", max_model_len=2048)


def assert_same_until_a_near_tie(case: dict[str, Any], output: Any) -> int:
    """Compare step by step; a step at a near tie may choose the other token, and ends the comparison.

    Returns how many steps were compared."""
    for step, (expected_id, reference) in enumerate(zip(case["output_token_ids"], case["steps"], strict=True)):
        ours = output.logprobs[step]
        for token_id, expected in zip(reference["top_ids"], reference["top_logprobs"], strict=True):
            if token_id in ours:
                assert ours[token_id].logprob == pytest.approx(expected, abs=LOGPROB_TOLERANCE), (step, token_id)
        best, second = reference["top_logprobs"][:2]
        if output.token_ids[step] != expected_id:
            assert best - second <= MARGIN, (step, output.token_ids[step], expected_id, best - second)
            return step
        assert expected_id in ours
    assert len(output.token_ids) == len(case["output_token_ids"])
    assert output.finish_reason == case["finish"]
    return len(case["steps"])


def generate_golden(engine: LLM, golden: dict[str, Any]) -> list[Any]:
    cases = golden["cases"]
    params = [SamplingParams(temperature=0, max_tokens=max_tokens(case), logprobs=5) for case in cases]
    outputs = engine.generate([case["prompt_token_ids"] for case in cases], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def max_tokens(case: dict[str, Any]) -> int:
    return len(case["output_token_ids"])


def test_smollm2_in_float32_gives_the_reference_tokens_and_logprobs(smollm2_gguf: Any, golden_smollm2: Any) -> None:
    outputs = generate_golden(float32_engine(smollm2_gguf), golden_smollm2)
    compared = [
        assert_same_until_a_near_tie(case, output)
        for case, output in zip(golden_smollm2["cases"], outputs, strict=True)
    ]
    # Near ties are rare: if most steps were not compared, the check above would have proved nothing.
    total = sum(len(case["steps"]) for case in golden_smollm2["cases"])
    assert sum(compared) > 0.9 * total, (compared, total)


def test_gemma3_in_float32_gives_the_reference_tokens_and_logprobs(gemma3_gguf: Any, golden_gemma3: Any) -> None:
    outputs = generate_golden(float32_engine(gemma3_gguf), golden_gemma3)
    compared = [
        assert_same_until_a_near_tie(case, output) for case, output in zip(golden_gemma3["cases"], outputs, strict=True)
    ]
    total = sum(len(case["steps"]) for case in golden_gemma3["cases"])
    assert sum(compared) > 0.9 * total, (compared, total)


def top1_differences(engine: LLM, golden: dict[str, Any]) -> list[float]:
    """|our log-probability - the reference's| of the reference's best token, at every step of every case, each on the
    reference's own prefix."""
    prompts, expected = [], []
    for case in golden["cases"]:
        for step, reference in enumerate(case["steps"]):
            prompts.append(case["prompt_token_ids"] + case["output_token_ids"][:step])
            expected.append((reference["top_ids"][0], reference["top_logprobs"][0]))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    differences = []
    for output, (token_id, logprob) in zip(outputs, expected, strict=True):
        ours = output.outputs[0].logprobs[0]
        assert token_id in ours, "the reference's best token is not among our best 21"
        differences.append(abs(ours[token_id].logprob - logprob))
    return differences


def test_the_default_weights_format_of_smollm2_is_within_its_stated_distance_of_float32(
    smollm2_gguf: Any, golden_smollm2: Any
) -> None:
    differences = top1_differences(LLM(model=str(smollm2_gguf), max_model_len=2048), golden_smollm2)
    mean = statistics.fmean(differences)
    assert 0 < mean <= MEAN_TOLERANCE_DEFAULT_FORMAT, mean


def test_an_int8_cache_is_within_its_stated_distance_of_float32_on_smollm2(
    smollm2_gguf: Any, golden_smollm2: Any
) -> None:
    engine = LLM(model=str(smollm2_gguf), dtype="float32", kv_cache_dtype="int8", max_model_len=2048)
    mean = statistics.fmean(top1_differences(engine, golden_smollm2))
    assert 0 < mean <= MEAN_TOLERANCE_INT8_CACHE, mean


def test_an_int8_cache_is_within_its_stated_distance_of_float32_on_gemma3(gemma3_gguf: Any, golden_gemma3: Any) -> None:
    engine = LLM(model=str(gemma3_gguf), dtype="float32", kv_cache_dtype="int8", max_model_len=2048)
    mean = statistics.fmean(top1_differences(engine, golden_gemma3))
    assert 0 < mean <= MEAN_TOLERANCE_INT8_CACHE, mean
