"""A cache that nobody can see, and names of models: H44 to H48.

H45, H46 and H48 are about adapters (LoRA), which Octavo does not serve yet. What stands in for them is what adapters
will be built on: a namespace of the cache for each set of weights, and no option that is taken and ignored.
"""

from __future__ import annotations

import pytest

from octavo.cli.main import main
from tests.cases.conftest import Api
from tests.core.tiny_core import TinyCore, tokens_alone


@pytest.mark.parametrize("num_tokens", [16, 33, 64])
def test_h44_a_cached_prompt_gives_the_same_text(api: Api, num_tokens: int) -> None:
    prompt = api.tokenize("The warehouse holds apples, pears and plums, and a clerk counts them. " * 8)[:num_tokens]
    options = {"max_tokens": 12, "logprobs": 2, "cache_salt": f"h44-{num_tokens}"}
    answers = [api.complete(prompt, **options) for _ in range(5)]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    hits = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert hits[0] == 0
    assert all(hit > 0 for hit in hits[1:])


def test_h44_a_prompt_that_shares_a_prefix_gives_its_own_text(api: Api) -> None:
    shared = "The warehouse holds apples, pears and plums, and a clerk counts them every single morning. "
    for end in ("Then he", "Then she", "After that"):
        cold = api.complete(shared + end, max_tokens=8, cache_salt=f"h44 {end}")["choices"]
        assert api.complete(shared + end, max_tokens=8, cache_salt="h44 shared")["choices"] == cold


def test_h45_namespaces_share_no_blocks() -> None:
    core = TinyCore(num_blocks=20)
    for number, salt in enumerate(("", "A", "B", "", "A", "B")):
        core.add(f"r{number}", range(12), salt=salt, max_tokens=2)
        core.finish()
        assert core.finals(f"r{number}")[0].num_cached_tokens == (0 if number < 3 else 12)
        assert core.tokens(f"r{number}") == tokens_alone(range(12), max_tokens=2)


def test_h45_over_http_a_salt_is_a_namespace(api: Api) -> None:
    prompt = [504] * 40
    cached = []
    for salt in ("h45 a", "h45 b", "h45 a"):
        usage = api.complete(prompt, max_tokens=1, cache_salt=salt)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_h46_after_the_weights_changed_nothing_of_before_is_found() -> None:
    core = TinyCore(num_blocks=20)
    core.add("before", range(12), max_tokens=2)
    core.step()
    core.core.reset_prefix_cache()
    core.finish()
    core.add("after", range(12), max_tokens=2)
    core.finish()
    assert core.finals("after")[0].num_cached_tokens == 0


def test_h47_every_listed_model_answers_and_no_other(api: Api) -> None:
    for model in api.http.get("/v1/models").json()["data"]:
        assert api.http.get(f"/v1/models/{model['id']}").json() == model
        answer = api.post("/v1/completions", model=model["id"], prompt="x", max_tokens=1)
        assert answer.json()["model"] == model["id"]
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": []})):
        answer = api.post(path, model="an-adapter", **body)
        assert answer.status_code in (400, 404)
        if path == "/v1/completions":
            assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("option", ["--lora-modules=a=b", "--max-lora-rank=8", "--enable-lora"])
def test_h48_an_option_for_adapters_is_refused_before_anything_is_loaded(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["octavo", "serve", "nothing", option])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err
