"""Seeds, temperature, penalties, ids: H18 to H24."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from octavo.core.interfaces import SchedulerOutput
from octavo.executor.sampler import Sampler
from octavo.ops.reference import ReferenceOps
from tests.cases.conftest import Api
from tests.core.tiny_core import EOS, TinyCore
from tests.executor.test_sampler import logits_of, sampling

STORY = "Once upon a time"


def test_h18_a_seeded_text_does_not_depend_on_its_neighbours(api: Api) -> None:
    bodies = [
        {"model": "smollm2", "prompt": STORY, "max_tokens": 12, "temperature": 1, "seed": seed} for seed in range(4)
    ]

    async def ask_together(bodies: list[dict[str, Any]]) -> dict[int, str]:
        async with httpx.AsyncClient(base_url=api.server.url, timeout=120) as http:
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        return {body["seed"]: a.json()["choices"][0]["text"] for body, a in zip(bodies, answers, strict=True)}

    in_order = asyncio.run(ask_together(bodies))
    assert asyncio.run(ask_together(bodies[::-1])) == in_order
    alone = {body["seed"]: api.post("/v1/completions", **body).json()["choices"][0]["text"] for body in bodies}
    assert alone == in_order
    assert len(set(alone.values())) == 4


def test_h19_a_seed_reaches_the_sampler(api: Api) -> None:
    for ask in (api.complete, api.chat):
        options = {"max_tokens": 10, "temperature": 0.5}
        first, second, other = (ask(STORY, seed=seed, **options)["choices"] for seed in (123, 123, 124))
        assert first == second
        assert first != other


def test_h19_without_a_seed_answers_differ(api: Api) -> None:
    texts = {api.complete(STORY, max_tokens=10, temperature=1)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 1, "top_p": 1e-4},
        {"temperature": 1, "top_p": 5e-324},
        {"temperature": 2, "top_k": 1},
        {"temperature": 1, "min_p": 1},
    ],
)
def test_h20_settings_that_leave_one_token_are_greedy(api: Api, options: dict[str, float]) -> None:
    greedy = api.complete(STORY, max_tokens=10)["choices"][0]["text"]
    assert api.complete(STORY, max_tokens=10, **options)["choices"][0]["text"] == greedy


def test_h21_a_repetition_penalty_counts_the_prompt(api: Api) -> None:
    prompt = "ha" + " ha" * 12
    assert api.complete(prompt, max_tokens=1)["choices"][0]["text"] == " ha"
    assert api.complete(prompt, max_tokens=1, repetition_penalty=50)["choices"][0]["text"] != " ha"
    paris = [38634, *[7042] * 5]
    favoured = {"logit_bias": {"7042": 20}}
    assert api.complete(paris, max_tokens=1, **favoured)["choices"][0]["text"] == " Paris"
    assert api.complete(paris, max_tokens=1, repetition_penalty=50)["choices"][0]["text"] != " Paris"


def test_h21_presence_and_frequency_count_the_answer_only(api: Api) -> None:
    prompt = "ha" + " ha" * 12
    for options in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert api.complete(prompt, max_tokens=1, **options)["choices"][0]["text"] == " ha"


def test_h21_the_penalised_logits_are_hugging_faces() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prompt = [1, 3, 3, 5]
    logits = logits_of(1)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([prompt]), torch.tensor(logits.copy()))[0].numpy()
    plan = [sampling(1, prompt, repetition_penalty=1.7, temperature=0.0, logprobs=logits.shape[1])]
    output = Sampler(ReferenceOps()).sample(logits.copy(), SchedulerOutput(scheduled=plan))
    assert output.token_ids[1] == int(expected.argmax())


@pytest.mark.parametrize("end", [EOS, 98])
def test_h22_no_end_token_comes_before_min_tokens(end: int) -> None:
    core = TinyCore(choose=lambda sequence: None if end in sequence.banned_token_ids else end)
    core.add("a", (1, 2), max_tokens=8, min_tokens=5, stop_token_ids=(98,))
    core.finish()
    assert len(core.tokens("a")) >= 5
    assert end not in core.tokens("a")[:5]


def test_h22_over_http_no_end_before_min_tokens(api: Api) -> None:
    ends = {"2": 100}
    answer = api.complete(STORY, logit_bias=ends, max_tokens=20)
    assert answer["usage"]["completion_tokens"] == 1
    answer = api.complete(STORY, logit_bias=ends, max_tokens=20, min_tokens=5)
    assert answer["usage"]["completion_tokens"] >= 5
    answer = api.complete(STORY, max_tokens=8, min_tokens=5, stop_token_ids=list(range(1, 200)))
    assert answer["usage"]["completion_tokens"] >= 5


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [49152, 10**9])
def test_h23_an_id_outside_the_vocabulary_is_a_400_that_names_it(api: Api, field: str, token_id: int) -> None:
    value: Any = {str(token_id): 5} if field == "logit_bias" else [token_id]
    messages = [{"role": "user", "content": "hi"}]
    error = api.refuse("/v1/chat/completions", messages=messages, max_tokens=5, **{field: value})
    assert str(token_id) in error["message"]
    assert error["param"].startswith(field)


def test_h23_the_last_id_of_the_vocabulary_is_fine(api: Api) -> None:
    assert api.complete("Hi", logit_bias={"49151": 5}, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("prompt", [[999999], [49152], [1, -1], [[1], [49152]]])
def test_h24_a_prompt_token_outside_the_vocabulary_is_a_400_that_names_it(api: Api, prompt: Any) -> None:
    error = api.refuse("/v1/completions", prompt=prompt, max_tokens=1)
    worst = prompt[-1][0] if isinstance(prompt[-1], list) else prompt[-1]
    assert str(worst) in error["message"]
    assert error["param"].startswith("prompt")


def test_h24_a_list_of_texts_among_ids_is_refused(api: Api) -> None:
    assert api.refuse("/v1/completions", prompt=[1, "a"])["param"] == "prompt"
