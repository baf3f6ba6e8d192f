"""Whatever a model prefers, what it finishes under a schema is valid by `jsonschema`, a judge that is not ours."""

from __future__ import annotations

import datetime
import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.structured.compile import validate_spec
from octavo.structured.json_text import MAX_DEPTH
from tests.structured.conftest import EOS_TOKEN_IDS, VOCAB_SIZE, Sample, allowed_ids
from tests.structured.schemas import ACCEPTED, EMPTY, REFUSED

SEEDS = range(6)


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def modern(schema: Any) -> Any:
    """jsonschema reads items as a list only under an old draft."""
    return (
        {"$schema": "http://json-schema.org/draft-07/schema#", **schema} if "additionalItems" in str(schema) else schema
    )


@pytest.mark.parametrize("name", ACCEPTED)
def test_finished_text_is_valid_and_cut_text_is_a_beginning(sample: Sample, name: str) -> None:
    schema = ACCEPTED[name]
    num_finished = 0
    for seed in SEEDS:
        sampled = sample(spec_of(schema), seed, max_tokens=200, is_eager=seed % 2 == 0)
        if sampled.is_finished:
            num_finished += 1
            value = json.loads(sampled.text.decode("utf-8"))
            judge = jsonschema.validators.validator_for(modern(schema), default=jsonschema.Draft202012Validator)
            judge(modern(schema), format_checker=judge.FORMAT_CHECKER).validate(value)
            for number in numbers_of(value):
                assert math.isfinite(number)
        else:
            assert_is_beginning(sampled.text)
    assert num_finished > 0


def assert_is_beginning(text: bytes) -> None:
    """Cut JSON is told from broken JSON by where the parser stops: at the end, or in what was cut."""
    fault = find_json_fault(text.decode("utf-8", "ignore"))
    if fault is not None:
        rest = fault.doc[fault.pos :]
        is_cut_string = fault.msg.startswith("Unterminated string") or "escape" in fault.msg
        is_cut_word = any(word.startswith(rest) for word in ("true", "false", "null", "-"))
        assert fault.pos >= len(fault.doc.rstrip()) or is_cut_string or is_cut_word, (fault, fault.doc[-80:])


def find_json_fault(text: str) -> json.JSONDecodeError | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as fault:
        return fault
    return None


def numbers_of(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for entry in value for number in numbers_of(entry)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


@pytest.mark.parametrize("name", ["date-time", "time"])
def test_times_are_times(sample: Sample, name: str) -> None:
    read = {"date-time": datetime.datetime, "time": datetime.time}[name].fromisoformat
    for seed in range(30):
        text = json.loads(sample(spec_of({"type": "string", "format": name}), seed).text)
        # Python 3.10 reads neither Z nor a fraction of one digit.
        read(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))


def test_host_names_are_short_enough(sample: Sample) -> None:
    for seed in range(30):
        sampled = sample(spec_of({"type": "string", "format": "hostname"}), seed)
        assert not sampled.is_finished or len(json.loads(sampled.text)) <= 253


def test_there_are_enough_schemas() -> None:
    assert len(ACCEPTED) >= 60


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_path(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(InvalidRequestError, match="JSON schema cannot be used") as refusal:
        validate_spec(spec_of(schema), "response_format.json_schema.schema")
    assert f"at {path}, " in refusal.value.message or f"at {path}/" in refusal.value.message
    assert refusal.value.param == "response_format.json_schema.schema"
    assert refusal.value.code == "invalid_grammar"


@pytest.mark.parametrize("name", EMPTY)
def test_a_schema_that_nothing_satisfies_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        validate_spec(spec_of(EMPTY[name]))
    assert refusal.value.code == "invalid_grammar"


def test_a_misspelt_keyword_is_told_the_nearest_one() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'maxLength'"):
        validate_spec(spec_of({"maxLenght": 3}))


def test_a_oneOf_that_may_overlap_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidRequestError, match="use anyOf"):
        validate_spec(spec_of({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}))


def test_h35_a_property_that_is_a_number_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at #/properties/a, a schema is an object, true or false"):
        validate_spec(spec_of({"type": "object", "properties": {"a": 3}}))


def test_h37_minItems_and_maxItems_are_kept(sample: Sample) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    for seed in range(20):
        sampled = sample(spec_of(schema), seed)
        assert sampled.is_finished
        assert len(json.loads(sampled.text)) == 2


@pytest.mark.parametrize(
    "schema",
    [{}, {"type": "number"}, {"type": "integer"}, {"type": "array", "items": {"type": "number"}, "maxItems": 3}],
)
def test_h38_numbers_end(factory: Any, tokenizer: Any, schema: Any) -> None:
    """A model that only wants digits: the number ends all the same."""
    grammar = factory(spec_of(schema))
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    text = b""
    for _ in range(200):
        grammar.write_mask(mask)
        allowed = allowed_ids(mask)
        liked = [i for i in allowed if tokenizer.token_bytes(i).isdigit()]
        liked += [i for i in allowed if tokenizer.token_bytes(i) in (b".", b"e", b"E")] if not liked else []
        token_id = (liked or allowed)[-1]
        grammar.accept(token_id)
        if token_id in EOS_TOKEN_IDS:
            break
        text += tokenizer.token_bytes(token_id)
        if grammar.is_complete:
            break
    else:
        pytest.fail(f"the text did not end: {text[:80]!r}")
    assert all(math.isfinite(number) for number in numbers_of(json.loads(text)))


def test_white_space_is_capped(factory: Any, tokenizer: Any) -> None:
    grammar = factory(spec_of(ACCEPTED["required out of order"]))
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    run = longest = 0
    for _ in range(200):
        grammar.write_mask(mask)
        allowed = allowed_ids(mask)
        blank = [i for i in allowed if tokenizer.token_bytes(i).isspace()]
        token_id = (blank or allowed)[0]
        token = tokenizer.token_bytes(token_id)
        run = run + len(token) if token.isspace() else 0
        longest = max(longest, run)
        grammar.accept(token_id)
        if grammar.is_complete:
            break
    assert grammar.is_complete
    assert longest <= 17


@pytest.mark.parametrize("depth", [MAX_DEPTH + 5, 3000, 20_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(InvalidRequestError, match="nests deeper than 64 levels"):
        validate_spec(GrammarSpec("json_schema", '{"items":' * depth + "{}" + "}" * depth))


def test_a_long_chain_of_references_is_refused() -> None:
    """Two thousand of them overflow the compiler's stack, which no exception reports."""
    definitions: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {}]} for i in range(900)}
    with pytest.raises(InvalidRequestError, match=r"the limit is 200|more than|limit is 500"):
        validate_spec(spec_of({"$ref": "#/$defs/d0", "$defs": {**definitions, "d900": {}}}))


def test_the_longest_chain_of_references_fits_on_a_small_stack() -> None:
    """A chain as long as the limits allow, in a thread with the stack that macOS gives."""
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(199)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d199": {"type": "integer"}}}
    previous = threading.stack_size(512 * 1024)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(validate_spec, spec_of(schema)).result()
    finally:
        threading.stack_size(previous)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "null", '{"minimum": NaN}', '{"minimum": 1e999}'])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        validate_spec(GrammarSpec("json_schema", text))


def test_every_type_of_json_object_is_an_object(sample: Sample) -> None:
    for seed in SEEDS:
        sampled = sample(GrammarSpec("json_object"), seed, max_tokens=150, is_eager=True)
        if sampled.is_finished:
            assert isinstance(json.loads(sampled.text), dict)
