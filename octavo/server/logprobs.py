"""Log-probabilities in the API's two shapes: a chat's list of entries, and the older endpoint's four lists.

The numbers come from the raw logits and may be minus infinity; JSON has no such number, so they stop at MIN_LOGPROB.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from octavo.core.interfaces import TokenLogprobs
from octavo.server.api import TokenTexts

MIN_LOGPROB = -9999.0


def chat_logprobs(tokenizer: TokenTexts, tokens: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """The entries of `choices[].logprobs.content`."""
    return [
        {
            **_chat_entry(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]


class CompletionLogprobs:
    """The older shape for one choice. It counts characters across chunks, so that offsets go on where they stopped."""

    def __init__(self, tokenizer: TokenTexts, num_top: int):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """text_offset: where each token begins in the generated text; parts of a character share its place."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            own_bytes = self._tokenizer.token_bytes(token.token_id)
            own_text, own_logprob = visible_text(own_bytes), clamp_logprob(token.logprob)
            lists["tokens"].append(own_text)
            lists["token_logprobs"].append(own_logprob)
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(own_bytes))
            # Best first, so of two tokens with one text the better one stays. The sampled token is always there.
            alternatives: dict[str, float] = {}
            for token_id, logprob in token.top:
                alternatives.setdefault(visible_text(self._tokenizer.token_bytes(token_id)), clamp_logprob(logprob))
            alternatives.setdefault(own_text, own_logprob)
            lists["top_logprobs"].append(alternatives)
        if self._num_top == 0:
            return {**lists, "top_logprobs": None}
        return lists


def clamp_logprob(logprob: float) -> float:
    # A comparison with NaN is false, so NaN ends up at the bottom, too.
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def visible_text(token_bytes: bytes) -> str:
    """The token as text; a token that is part of a character is spelled out, so that two of them can be told apart."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _chat_entry(tokenizer: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    return {"token": visible_text(token_bytes), "logprob": clamp_logprob(logprob), "bytes": list(token_bytes)}
