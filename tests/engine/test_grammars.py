"""Constrained text through the whole engine, on the real SmolLM2: what is finished satisfies what was asked."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, AsyncEngine, EngineArgs, SamplingParams
from octavo.core.interfaces import GrammarSpec
from octavo.engine.outputs import RequestOutput
from octavo.errors import EngineDeadError, InvalidRequestError
from tests.engine.fake_model import EXECUTOR_NAME, make_tokenizer, source
from tests.structured.schemas import ACCEPTED

PERSON = ACCEPTED["person"]
SCHEMAS = [
    {"json": ACCEPTED[name]}
    for name in (
        "person", "null", "boolean", "integer range", "number range", "several types", "array", "object",
    )
]  # fmt: skip
PROMPT = "Describe a person as JSON:"
# SmolLM2-135M: 30 layers, keys and values, 3 heads of 64, float16, 16 tokens.
BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * 16


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    return LLM(str(smollm2_gguf), max_model_len=512, max_num_seqs=16)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def assert_valid(outputs: list[RequestOutput], schemas: list[Any]) -> int:
    """Returns how many have ended; what was cut says so."""
    num_ended = 0
    for output, schema in zip(outputs, schemas, strict=True):
        for completion in output.outputs:
            if completion.finish_reason == "length":
                continue
            assert completion.finish_reason == "stop", completion
            jsonschema.validate(json.loads(completion.text), schema)
            num_ended += 1
    return num_ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_outputs_validate_16_at_a_time(llm: LLM, temperature: float) -> None:
    asked = SCHEMAS * 2
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=60) for seed in range(len(asked))]
    prompts = [f"{PROMPT} number {i}" for i in range(len(asked))]
    outputs = llm.generate(prompts, params, structured_outputs=asked, use_tqdm=False)
    assert assert_valid(outputs, [entry["json"] for entry in asked]) >= 10


def test_each_kind_and_none_beside_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
    free = llm.generate(PROMPT, params, use_tqdm=False)
    outputs = llm.generate(
        [PROMPT] * 5,
        params,
        structured_outputs=[
            {"regex": "[a-f]{3}-[0-9]{2}"},
            {"choice": ["ďábelské", "\U0001f336"]},
            {"grammar": 'start: "x" (" y")* " z"'},
            None,
            GrammarSpec("json_object"),
        ],
        use_tqdm=False,
    )
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", texts(outputs)[0])
    assert texts(outputs)[1] in ("ďábelské", "\U0001f336")
    assert re.fullmatch("x( y)*( z)?", texts(outputs)[2])
    assert texts(outputs)[3] == texts(free)[0]
    assert texts(outputs)[4].startswith("{")
    assert [output.outputs[0].finish_reason for output in outputs[:2]] == ["stop", "stop"]


def test_n_generations_min_tokens_stop_and_a_second_run_from_the_prefix_cache(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=60, min_tokens=30, ignore_eos=True)
    prompt = " ".join(["A person, as JSON."] * 20)
    first = llm.generate(prompt, params, structured_outputs={"json": PERSON}, use_tqdm=False)
    second = llm.generate(prompt, params, structured_outputs={"json": PERSON}, use_tqdm=False)
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens > 0
    assert texts(first) == texts(second)
    assert len(set(texts(first))) == 3
    assert_valid(first, [PERSON])
    (stopped,) = llm.generate(
        prompt, SamplingParams(max_tokens=60, stop=('"name"',)), structured_outputs={"json": PERSON}, use_tqdm=False
    )
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", '"name"')


def test_preemption_changes_nothing(llm: LLM, smollm2_gguf: Path) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=80) for seed in range(6)]
    asked = {"json": {"type": "array", "minItems": 8, "items": {"enum": ["one", "two", "three hundred"]}}}
    prompts = [f"{i}: a list of words " + "word " * 20 for i in range(6)]
    expected = llm.generate(prompts, params, structured_outputs=asked, use_tqdm=False)
    small = LLM(str(smollm2_gguf), max_model_len=160, kv_cache_memory_bytes=20 * BLOCK_BYTES)
    assert texts(small.generate(prompts, params, structured_outputs=asked, use_tqdm=False)) == texts(expected)
    assert small.stats().num_preemptions_total > 0
    assert assert_valid(expected, [asked["json"]] * 6) > 0


def test_a_bad_grammar_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="regex") as caught:
        llm.generate("a", structured_outputs={"regex": "[.*"}, use_tqdm=False)
    assert caught.value.code == "invalid_grammar"
    with pytest.raises(InvalidRequestError, match="2 entries"):
        llm.generate("a", structured_outputs=[None, None], use_tqdm=False)


# --- AsyncEngine ----------------------------------------------------------------------------------------------


def run(test: Callable[[AsyncEngine], Awaitable[None]], args: EngineArgs, **options: Any) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(args, restart_delay_s=0.0, **options)
        try:
            await asyncio.wait_for(test(engine), 120)
        finally:
            await engine.shutdown()

    asyncio.run(main())


def run_with_bytes(test: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """The model that counts, with one token a byte."""
    run(
        test,
        EngineArgs(model="fake", max_model_len=1000),
        source=source(),
        tokenizer=make_tokenizer(),
        executor_name=EXECUTOR_NAME,
    )


async def read_text(engine: AsyncEngine, prompt: bytes | list[int], spec: GrammarSpec, **params: Any) -> str:
    settings = SamplingParams(**{"max_tokens": 60, **params})
    deltas = [delta async for delta in engine.generate(prompt, settings, grammar=spec)]
    assert [delta.is_final for delta in deltas].count(True) == 1
    assert all("\ufffd" not in delta.text for delta in deltas)
    return "".join(delta.text for delta in deltas)


def test_streams_of_the_engine_process(smollm2_gguf: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        ids = engine.tokenizer.encode(PROMPT)
        person = GrammarSpec("json_schema", json.dumps({**PERSON, "required": ["name", "age", "email"]}))
        await engine.prepare_grammar(person)
        found = await asyncio.gather(
            *(read_text(engine, ids, person, seed=seed, max_tokens=120) for seed in range(4)),
            read_text(engine, ids, GrammarSpec("choice", '["ďábelské"]')),
        )
        assert found[4] == "ďábelské"
        for text in found[:4]:
            assert text.startswith("{")
            if text.endswith("}"):
                jsonschema.validate(json.loads(text), PERSON)

    run(test, EngineArgs(model=str(smollm2_gguf), max_model_len=512))


def test_a_grammar_is_refused_at_the_door_and_the_engine_lives() -> None:
    async def test(engine: AsyncEngine) -> None:
        for text in ("[.*", "(|"):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.prepare_grammar(GrammarSpec("regex", text), "structured_outputs.regex")
            assert (caught.value.param, caught.value.code) == ("structured_outputs.regex", "invalid_grammar")
            with pytest.raises(InvalidRequestError):
                await read_text(engine, b"a", GrammarSpec("regex", text))
        assert engine.num_unfinished_requests == 0
        # The fake model counts on from the prompt's last byte and looks at no mask; "bcd" is what it says after "a".
        assert await read_text(engine, b"a", GrammarSpec("choice", '["bcd"]')) == "bcd"
        stream = engine.generate(b"a", SamplingParams(), grammar=GrammarSpec("choice", '["bx"]'))
        deltas = [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == "b"
        assert deltas[-1].finish_reason == "error"
        assert "not allowed" in str(deltas[-1].error)

    run_with_bytes(test)


def test_the_vocabulary_is_sent_again_after_a_restart() -> None:
    async def test(engine: AsyncEngine) -> None:
        spec = GrammarSpec("choice", '["bcd"]')
        assert await read_text(engine, b"a", spec) == "bcd"
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await read_text(engine, b"a", spec, max_tokens=None)
        await engine.wait_until_running(60)
        assert await read_text(engine, b"a", spec) == "bcd"

    run_with_bytes(test)
