"""The grammar of a chat's answer: of its calls, where they are forced or strict, and of its text."""

from __future__ import annotations

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.server.api import ServingEngine
from octavo.server.chat_prompt import ChatPrompt
from octavo.server.constraint import Constraint

_PARAM = "tools"


async def constrain_calls(engine: ServingEngine, prompt: ChatPrompt, text: Constraint | None) -> Constraint | None:
    """text: what the request asks of the answer's text. Raises InvalidRequestError for a schema that cannot be used.

    Where calls are forced there is no text, so its constraint has nothing to say.
    """
    if not prompt.choice.may_call:
        return text
    if text is not None and not prompt.choice.must_call:
        raise InvalidRequestError(
            f'{text.param.partition(".")[0]} and tools with tool_choice "auto" cannot go together here; send '
            'tool_choice "none" for an answer in that form, or "required" for calls.',
            param=text.param.partition(".")[0],
            code="unsupported_combination",
        )
    spec = _make_spec(prompt, follows_schemas=True)
    if spec is None:
        return None
    try:
        await engine.prepare_grammar(spec, _PARAM)
    except InvalidRequestError:
        loose = _make_spec(prompt, follows_schemas=False)
        if loose is None or loose == spec:
            raise
        # A tool that is not strict promises nothing about its arguments. If a strict one is at fault, it is told now.
        await engine.prepare_grammar(loose, _PARAM)
        spec = loose
    return Constraint(spec, _PARAM)


def _make_spec(prompt: ChatPrompt, *, follows_schemas: bool) -> GrammarSpec | None:
    grammar = prompt.dialect.grammar(
        prompt.choice, prompt.starts_inside, prompt.is_parallel, follows_schemas=follows_schemas
    )
    return None if grammar is None else GrammarSpec(*grammar)
