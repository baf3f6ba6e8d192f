"""Texts and messages become token ids: the one path that generation and `/tokenize` share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.server.api import ServingEngine
from octavo.text.chat_template import ChatTemplate, encode_chat

# Above this many characters the tokenizer works in a thread: it would hold up everybody's streams for milliseconds.
LONG_TEXT_CHARS = 8192


async def encode_messages(
    engine: ServingEngine,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    num_other_chars: int = 0,
    add_special_tokens: bool = False,
    is_bounded: bool = True,
    variables: Mapping[str, Any] = {},
    **options: Any,
) -> list[int]:
    """The prompt that a chat gives the model.

    num_other_chars:    of what the template writes besides the messages' contents
    add_special_tokens: put BOS before what the template prints, if the model has one and the template did not print it
    is_bounded:         refuse what cannot fit in max_model_len, before the work
    variables, options: of `text.chat_template.encode_chat`
    Raises InvalidRequestError.
    """
    tokenizer = engine.tokenizer
    num_chars = num_other_chars + sum(len(message.get("content") or "") for message in messages)
    if is_bounded:
        check_text_length(engine, num_chars, "messages")
    token_ids: list[int] = await _run(
        partial(encode_chat, tokenizer, template, messages, **options, **variables), num_chars
    )
    if add_special_tokens and tokenizer.adds_bos and token_ids[:1] != [tokenizer.bos_token_id]:
        token_ids = [tokenizer.bos_token_id, *token_ids]
    return token_ids


async def encode_prompts(
    engine: ServingEngine,
    prompts: Sequence[str | list[int]],
    *,
    add_special_tokens: bool = True,
    is_bounded: bool = True,
) -> list[list[int]]:
    """Prompts of /v1/completions; token ids stay as they are. The arguments are those of `encode_messages`."""
    num_chars = 0
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            num_chars += len(prompt)
            if is_bounded:
                check_text_length(engine, len(prompt), "prompt" if len(prompts) == 1 else f"prompt[{number}]")
    encode = engine.tokenizer.encode

    def encode_all() -> list[list[int]]:
        return [encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts]

    return await _run(encode_all, num_chars)


def name_prompt(param: str) -> str:
    """How a sentence about a prompt begins."""
    if param == "messages":
        return "The messages have"
    return f"{param} has" if "[" in param else f"The {param} has"


def check_text_length(engine: ServingEngine, num_chars: int, param: str) -> None:
    """Refuse what cannot fit before it is tokenized: that costs a second for every megabyte, and everybody's.

    Raises InvalidRequestError.
    """
    if num_chars <= LONG_TEXT_CHARS:
        return  # quickly tokenized, and then told exactly by how much it is too long
    max_model_len = engine.info.max_model_len
    if num_chars > max_model_len * engine.tokenizer.longest_token_chars:
        raise InvalidRequestError(
            f"{name_prompt(param)} {num_chars} characters, more than {max_model_len} tokens can hold, which is "
            f"max_model_len for prompt and answer together; shorten {'them' if param == 'messages' else 'it'}.",
            param=param,
            value=num_chars,
            code="context_length_exceeded",
        )


async def _run(encode: Callable[[], Any], num_chars: int) -> Any:
    return await asyncio.to_thread(encode) if num_chars > LONG_TEXT_CHARS else encode()
