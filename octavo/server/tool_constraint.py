"""The grammar of a chat's answer: of its calls, where they are forced or strict, and of its text."""

from __future__ import annotations

import json

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.server.api import ServingEngine
from octavo.server.chat_prompt import ChatPrompt
from octavo.server.constraint import Constraint

_PARAM = "tools"


async def constrain_answer(engine: ServingEngine, prompt: ChatPrompt, text: Constraint | None) -> Constraint | None:
    """text: what the request asks of the answer's text. Raises InvalidRequestError for a schema that cannot be used.

    Reasoning comes before the text and is free. Where calls are forced there is no text, so its form has nothing to
    say; where the model may call, the answer is either calls or text of that form.
    """
    if text is not None and prompt.choice.must_call:
        text = None
    spec = _make_spec(prompt, text, follows_schemas=True)
    if spec is None:
        return text
    if text is not None:
        await engine.prepare_grammar(text.spec, text.param)  # alone, so that its own faults are told as its own
    try:
        await engine.prepare_grammar(spec, _PARAM)
    except InvalidRequestError:
        await _check_strict_tools(engine, prompt)
        # A tool that is not strict promises nothing about its arguments.
        loose = _make_spec(prompt, text, follows_schemas=False)
        if loose is None or loose == spec:
            raise
        await engine.prepare_grammar(loose, _PARAM)
        spec = loose
    return Constraint(spec, _PARAM)


async def _check_strict_tools(engine: ServingEngine, prompt: ChatPrompt) -> None:
    """Raises InvalidRequestError that names the tool whose schema cannot be followed."""
    for tool in prompt.choice.tools:
        if tool.is_strict:
            try:
                await engine.prepare_grammar(GrammarSpec("json_schema", json.dumps(tool.parameters)), _PARAM)
            except InvalidRequestError as error:
                message = f"The tool {tool.name!r} cannot be strict. {error.message}"
                raise InvalidRequestError(message, param=_PARAM, code=error.code) from None


def _make_spec(prompt: ChatPrompt, text: Constraint | None, *, follows_schemas: bool) -> GrammarSpec | None:
    """None where nothing but the text's own form is asked for."""
    grammar = prompt.dialect.grammar(
        prompt.choice,
        prompt.starts_inside,
        prompt.is_parallel,
        follows_schemas=follows_schemas,
        has_form=text is not None,
    )
    if grammar is None or text is None:
        return None if grammar is None else GrammarSpec(*grammar)
    inner = {"kind": text.spec.kind, "text": text.spec.text}
    return GrammarSpec("composed", json.dumps({"lark": grammar[1], "text": inner}))
