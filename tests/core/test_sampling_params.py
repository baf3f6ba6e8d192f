from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("n", 0, "between 1 and 128"),
        ("n", 2.0, "an integer"),
        ("n", True, "an integer"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "1", "a number"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.5, "between 0 and 1"),
        ("top_k", -2, "use 0 or -1"),
        ("min_p", 1.1, "between 0 and 1"),
        ("max_tokens", 0, "between 1"),
        ("min_tokens", 17, "at most max_tokens, which is 16"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", 1e-320, "between 1e-06 and 1e+06"),
        ("repetition_penalty", 1e308, "between 1e-06 and 1e+06"),
        ("logprobs", 21, "between 0 and 20"),
        ("stop", ("",), "must not be empty"),
        ("stop", (7,), "must be a string"),
        ("stop_token_ids", (-1,), "between 0"),
        ("seed", 2**64, "between"),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", 1, "true or false"),
        ("logit_bias", {5: 101}, "between -100 and 100"),
        ("logit_bias", {5: math.nan}, "finite"),
        ("logit_bias", {"x": 1}, "an integer"),
        ("logit_bias", {"9" * 5000: 1}, "between 0"),
        ("logit_bias", [5], "an object"),
        ("logit_bias", 5, "an object"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "at most 1024"),
        ("allowed_token_ids", (), "at least one"),
        ("allowed_token_ids", (-1,), "between 0"),
        ("bad_words", ("",), "must not be empty"),
        ("bad_words", (7,), "must be a string"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_the_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert rule in caught.value.message
    assert caught.value.message.startswith(f"{field} is ")


def test_other_spellings_mean_the_same() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], top_k=-1)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.top_k) == (("end",), (1, 2), 0)
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy


def test_a_logit_bias_comes_as_json_or_python_and_is_kept_as_pairs() -> None:
    assert SamplingParams(logit_bias={"5": 1, 7: -2.5}).logit_bias == ((5, 1.0), (7, -2.5))  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=((5, 1.0),)).logit_bias == ((5, 1.0),)
    assert SamplingParams(logit_bias=None).logit_bias == ()  # type: ignore[arg-type]
