"""Sampling settings through the whole engine, on the real SmolLM2."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncEngine, EngineArgs, SamplingParams
from octavo.errors import InvalidRequestError

PROMPT = "The capital of France is"
PARIS = 7042  # " Paris"


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    return LLM(str(smollm2_gguf), max_model_len=256)


def complete(llm: LLM, **params: Any) -> Any:
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 8, **params})
    return llm.generate(PROMPT, settings, use_tqdm=False)[0].outputs[0]


def test_a_bad_word_is_avoided_and_the_rest_is_free(llm: LLM) -> None:
    assert complete(llm).token_ids[0] == PARIS
    assert "Paris" not in complete(llm, bad_words=("Paris",), max_tokens=20).text


def test_bias_and_allowed_tokens(llm: LLM) -> None:
    assert PARIS not in complete(llm, logit_bias={str(PARIS): -100}).token_ids
    assert complete(llm, logit_bias={PARIS: 100}).token_ids == [PARIS] * 8
    assert set(complete(llm, allowed_token_ids=(PARIS, 30), temperature=2.0, seed=1).token_ids) <= {PARIS, 30}
    with pytest.raises(InvalidRequestError, match="logit_bias has the token id 49152"):
        complete(llm, logit_bias={49152: 5})


def test_no_end_before_min_tokens_whatever_its_bias(llm: LLM) -> None:
    ends = llm.limits.eos_token_ids
    completion = complete(llm, logit_bias=dict.fromkeys(ends, 100), min_tokens=5)
    assert len(completion.token_ids) == 6
    assert not set(completion.token_ids[:5]) & set(ends)
    assert completion.finish_reason == "stop"


def test_a_kept_stop_string_ends_the_text(llm: LLM) -> None:
    completion = complete(llm, stop=("aris",), include_stop_str_in_output=True)
    assert (completion.text, completion.stop_reason) == (" Paris", "aris")


def test_prompt_logprobs_come_first_in_a_stream(llm: LLM, smollm2_gguf: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, n=2)
    (offline,) = llm.generate(PROMPT, params, use_tqdm=False)

    async def stream() -> list[Any]:
        engine = await AsyncEngine.start(EngineArgs(model=str(smollm2_gguf), max_model_len=256))
        try:
            ids = engine.tokenizer.encode(PROMPT)
            return [delta for _ in range(2) async for delta in engine.generate(ids, params)]
        finally:
            await engine.shutdown()

    deltas = asyncio.run(stream())
    with_scores = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert len(with_scores) == 2  # one for each request, the second on a warm cache
    assert with_scores[0].prompt_logprobs == with_scores[1].prompt_logprobs
    first, *others = with_scores[0].prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in others] == offline.prompt_token_ids[1:]
    assert offline.prompt_logprobs is not None
    expected = [entry[token_id].logprob for entry, token_id in zip(
        offline.prompt_logprobs[1:], offline.prompt_token_ids[1:], strict=True
    ) if entry is not None]  # fmt: skip
    assert [entry.logprob for entry in others] == expected
    assert all(len(entry.top) == 2 for entry in others)
