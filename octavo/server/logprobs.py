"""Log-probabilities in the API's shapes: a chat's list of entries, the older endpoint's four lists, vLLM's of a prompt.

The numbers come from the raw logits and may be minus infinity; JSON has no such number, so they stop at MIN_LOGPROB.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.core.interfaces import TokenLogprobs
from octavo.server.api import TokenTexts

MIN_LOGPROB = -9999.0

# The older endpoint's four lists, by their names.
Lists = dict[str, list[Any]]


def chat_logprobs(
    tokenizer: TokenTexts, tokens: Iterable[TokenLogprobs], *, shows_ids: bool = False
) -> list[dict[str, Any]]:
    """The entries of `choices[].logprobs.content`. shows_ids: return_tokens_as_token_ids"""
    return [
        {
            **_chat_entry(tokenizer, token.token_id, token.logprob, shows_ids),
            "top_logprobs": [_chat_entry(tokenizer, token_id, logprob, shows_ids) for token_id, logprob in token.top],
        }
        for token in tokens
    ]


def prompt_logprobs(
    tokenizer: TokenTexts, scored: Iterable[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: {token id: logprob, rank, decoded_token} for each token, null for the first.

    rank: 1 is the best; null for a token that is not among the num_top alternatives
    """
    return [None if token is None else _ranked_entries(tokenizer, token, num_top) for token in scored]


class CompletionLogprobs:
    """The older shape for one choice. It counts characters across chunks, so that offsets go on where they stopped.

    text_offset: where each token begins in the choice's text; parts of a character share its place, and a token that
    the text leaves out has no width.
    """

    def __init__(
        self, tokenizer: TokenTexts, num_top: int, *, skips_special_tokens: bool = True, shows_ids: bool = False
    ):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skips_special_tokens = skips_special_tokens
        self._shows_ids = shows_ids
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, token_ids: Sequence[int], scored: Sequence[TokenLogprobs | None], text: str) -> dict[str, Any]:
        """Of an echoed prompt; to be added first. text: as it is echoed, which may be without the BOS before it."""
        lists = _new_lists()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The prefix space of SentencePiece is a part of the first token, and not of the text.
        may_strip = self._tokenizer.strips_leading_space
        for token_id, token in zip(token_ids, scored, strict=True):
            self._append(lists, token_id, token)
            piece = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_special(token_id):
                shown = piece.decode("utf-8", "replace")
                shown = shown if text.startswith(shown, self._offset) else ""
            else:
                if may_strip and piece[:1] == b" " and text[self._offset : self._offset + 1] != " ":
                    piece = piece[1:]
                may_strip = False
                shown = decoder.decode(piece)
            self._offset = min(self._offset + len(shown), len(text))
        self._offset = len(text)
        return self._finish(lists)

    def add(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Of generated tokens."""
        lists = _new_lists()
        for token in tokens:
            self._append(lists, token.token_id, token)
            if not (self._skips_special_tokens and self._tokenizer.is_special(token.token_id)):
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token.token_id)))
        return self._finish(lists)

    def _append(self, lists: Lists, token_id: int, token: TokenLogprobs | None) -> None:
        """token: None for the first one of a prompt, which nothing predicted."""
        own_text = name_token(self._tokenizer, token_id, self._shows_ids)
        lists["tokens"].append(own_text)
        lists["text_offset"].append(self._offset)
        if token is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        own_logprob = clamp_logprob(token.logprob)
        lists["token_logprobs"].append(own_logprob)
        # Best first, so of two tokens with one text the better one stays. The token itself is always there.
        alternatives: dict[str, float] = {}
        for top_id, logprob in token.top[: self._num_top]:
            alternatives.setdefault(name_token(self._tokenizer, top_id, self._shows_ids), clamp_logprob(logprob))
        alternatives.setdefault(own_text, own_logprob)
        lists["top_logprobs"].append(alternatives)

    def _finish(self, lists: Lists) -> dict[str, Any]:
        return lists if self._num_top else {**lists, "top_logprobs": None}


def join_lists(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Of an echoed prompt and of what was generated."""
    return {name: None if entries is None else [*entries, *second[name]] for name, entries in first.items()}


def clamp_logprob(logprob: float) -> float:
    # A comparison with NaN is false, so NaN ends up at the bottom, too.
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def name_token(tokenizer: TokenTexts, token_id: int, shows_ids: bool = False) -> str:
    """The token's text, or with shows_ids vLLM's way to tell tokens of one text apart."""
    return f"token_id:{token_id}" if shows_ids else visible_text(tokenizer.token_bytes(token_id))


def visible_text(token_bytes: bytes) -> str:
    """The token as text; a token that is part of a character is spelled out, so that two of them can be told apart."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _chat_entry(tokenizer: TokenTexts, token_id: int, logprob: float, shows_ids: bool) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    return {
        "token": name_token(tokenizer, token_id, shows_ids),
        "logprob": clamp_logprob(logprob),
        "bytes": list(token_bytes),
    }


def _ranked_entries(tokenizer: TokenTexts, token: TokenLogprobs, num_top: int) -> dict[str, Any]:
    """The token itself first."""
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top[:num_top], start=1)}
    own = {token.token_id: ranked.get(token.token_id, (token.logprob, None))}
    return {
        str(token_id): {
            "logprob": clamp_logprob(logprob),
            "rank": rank,
            "decoded_token": visible_text(tokenizer.token_bytes(token_id)),
        }
        for token_id, (logprob, rank) in {**own, **ranked}.items()
    }


def _new_lists() -> Lists:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
