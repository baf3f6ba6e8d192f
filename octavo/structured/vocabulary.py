"""A tokenizer's tokens as plain bytes, in a form that crosses a process boundary.

The engine process has no tokenizer of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class TokenSource(Protocol):
    """What is needed of a tokenizer; `octavo.text.tokenizer.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token.

    joined:            all tokens' bytes, one after the other; about 0.3 MB for 49,152 tokens, 1.9 MB for 262,144
    ends:              [vocab_size] uint32 in the machine's byte order: token i is joined[ends[i - 1] : ends[i]]
    special_token_ids: control tokens, which never are part of constrained text; the end tokens are among them
    eos_token_ids:     tokens that may end the text where it is complete
    vocab_size:        columns of the model's logits; ids without a token have no bytes and are never allowed
    """

    joined: bytes
    ends: bytes
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def tokens(self) -> list[bytes]:
        ends = array("I", self.ends)
        found, start = [], 0
        for end in ends:
            found.append(self.joined[start:end])
            start = end
        return found


def vocabulary_of(tokenizer: TokenSource, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """vocab_size: the model's, which may be more or fewer than the tokenizer's

    Raises ValueError when there is no end token below vocab_size: constrained text could not end.
    """
    eos = tuple(dict.fromkeys(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
    if not eos:
        raise ValueError(f"there is no end token below {vocab_size}, so constrained text could not end")
    num_known = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_known)]
    ends, end = array("I"), 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    ends.extend([end] * (vocab_size - num_known))
    special = {token_id for token_id in range(num_known) if tokenizer.is_special(token_id)} | set(eos)
    return Vocabulary(b"".join(tokens), ends.tobytes(), tuple(sorted(special)), eos, vocab_size)
