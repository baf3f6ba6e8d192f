"""Beam search and best_of: against every possible answer, and on the real model against greedy decoding."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from pathlib import Path

import pytest

from octavo import LLM, AsyncEngine, EngineArgs, SamplingParams
from octavo.core.interfaces import TokenLogprobs
from octavo.engine.beam_search import BeamSearch, BeamSearchParams
from octavo.engine.best_of import BestOf, widen_params
from octavo.engine.outputs import CompletionDelta
from octavo.errors import InvalidRequestError

EOS = 2
PROMPT = "The three primary colors are"


def distribution(token_ids: tuple[int, ...], seed: int) -> list[float]:
    """Log-probabilities of three tokens after these."""
    rng = random.Random(f"{token_ids} {seed}")
    weights = [rng.random() + 0.01 for _ in range(3)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search_all(seed: int, max_tokens: int, length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """Every answer with its score, best first."""
    found = {}
    for tokens in itertools.product(range(3), repeat=max_tokens):
        tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        total = sum(distribution(tokens[:i], seed)[token] for i, token in enumerate(tokens))
        found[tokens] = total / max(len(tokens) - (tokens[-1] == EOS), 1) ** length_penalty
    return sorted(((score, tokens) for tokens, score in found.items()), reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_wide_enough_finds_the_best_of_all_answers(seed: int, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=10, max_tokens=4, length_penalty=length_penalty)
    search = BeamSearch(params, (EOS,))
    while not search.is_finished:
        answers = []
        for beam in search.live:
            logprobs = distribution(beam.token_ids, seed)
            top = sorted(enumerate(logprobs), key=lambda pair: -pair[1])
            answers.append(TokenLogprobs(top[0][0], top[0][1], tuple(top)))
        search.push(answers)
    score, tokens = search_all(seed, 4, length_penalty)[0]
    (best,) = search.best(1)
    assert best.token_ids == tokens
    assert best.score(length_penalty) == pytest.approx(score)
    assert best.finish_reason == ("stop" if tokens[-1] == EOS else "length")


@pytest.mark.parametrize(
    ("field", "value"), [("beam_width", 0), ("beam_width", 11), ("max_tokens", 0), ("length_penalty", math.nan)]
)
def test_wrong_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, field: value})


def test_one_beam_is_greedy_and_more_beams_score_no_less(smollm2_gguf: Path) -> None:
    llm = LLM(str(smollm2_gguf), max_model_len=256)
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10, logprobs=0), use_tqdm=False)[0].outputs[
        0
    ]
    (one,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_tokens=10))
    assert one.outputs[0].token_ids == greedy.token_ids
    assert one.outputs[0].text == greedy.text
    params = BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=0.0, ignore_eos=True)
    (four,) = llm.beam_search(PROMPT, params)
    totals = [completion.cumulative_logprob or 0.0 for completion in four.outputs]
    assert len(totals) == 4
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= (greedy.cumulative_logprob or 0.0)

    async def search() -> list[CompletionDelta]:
        engine = await AsyncEngine.start(EngineArgs(model=str(smollm2_gguf), max_model_len=256))
        try:
            ids = engine.tokenizer.encode(PROMPT)
            found = [delta async for delta in engine.beam_search(ids, params, num_beams=2)]
            sampled = SamplingParams(n=2, seed=1, max_tokens=8, logprobs=1)
            all_five = await collect(engine, ids, SamplingParams(n=5, seed=1, max_tokens=8, logprobs=0))
            best = [delta async for delta in engine.generate_best(ids, sampled, 5)]
        finally:
            await engine.shutdown()
        means = sorted((mean(logprobs) for logprobs in all_five.values()), reverse=True)
        assert [mean([entry.logprob for entry in delta.logprobs]) for delta in best] == pytest.approx(means[:2])
        assert [(delta.index, delta.is_final) for delta in best] == [(0, False), (1, True)]
        return found

    found = asyncio.run(search())
    assert [delta.token_ids for delta in found] == [completion.token_ids for completion in four.outputs[:2]]
    assert [delta.is_final for delta in found] == [False, True]
    assert found[0].num_prompt_tokens == len(four.prompt_token_ids)


async def collect(engine: AsyncEngine, ids: list[int], params: SamplingParams) -> dict[int, list[float]]:
    logprobs: dict[int, list[float]] = {}
    async for delta in engine.generate(ids, params):
        logprobs.setdefault(delta.index, []).extend(entry.logprob for entry in delta.logprobs)
    return logprobs


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_best_of_several_comes_first_and_a_failed_one_last() -> None:
    params = SamplingParams(n=2)
    best_of = BestOf(params)
    for index, (logprob, reason) in enumerate([(-3.0, "stop"), (-0.1, "error"), (-1.0, "length")]):
        best_of.push(CompletionDelta(index, f"{index}", [7], [TokenLogprobs(7, logprob)]))
        best_of.push(CompletionDelta(index, "!", [7], [TokenLogprobs(7, logprob)], finish_reason=reason))
    picked = best_of.pick()
    assert [(delta.index, delta.text, delta.logprobs, delta.is_final) for delta in picked] == [
        (0, "2!", [], False),
        (1, "0!", [], True),
    ]
    assert widen_params(params, 3).n == 3
    with pytest.raises(InvalidRequestError, match="best_of is 1"):
        widen_params(params, 1)
