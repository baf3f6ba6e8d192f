"""Tokens to text while they come: `IncrementalDetokenizer`."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from octavo.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """One generation's text, chunk by chunk. The chunks join to `tokenizer.decode` of all its tokens.

    A chunk never ends inside a UTF-8 character: its bytes are held until the character is whole, or certainly broken
    (then U+FFFD stands for it). Nothing else is held. Each token costs the same, however long the text is.

    is_continuation: the tokens go on from a prompt, so the first one keeps its leading space (see Tokenizer.decode)
    shown_token_ids: special tokens that are written out although special tokens are skipped: markers that a parser of
                     tool calls or reasoning must see
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
        shown_token_ids: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._shown_token_ids = frozenset(shown_token_ids)
        self._strips_next_space = tokenizer.strips_leading_space and not is_continuation
        self._decoder = _new_utf8_decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        tokenizer = self._tokenizer
        pieces = []
        for token_id in token_ids:
            if self._skips_special_tokens and tokenizer.is_special(token_id) and token_id not in self._shown_token_ids:
                continue
            piece = tokenizer.token_bytes(token_id)
            if self._strips_next_space and piece:
                piece = piece.removeprefix(b" ")
                self._strips_next_space = False
            pieces.append(piece)
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        """What was held of a character that never became whole: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
