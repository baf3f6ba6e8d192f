"""The vocabulary of a real model, and a driver that samples from masks as a model with no sense would."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from octavo.core.interfaces import GrammarSpec
from octavo.structured.compile import validate_spec
from octavo.structured.grammar import TokenGrammarFactory, make_grammar_factory
from octavo.structured.vocabulary import Vocabulary, vocabulary_of
from octavo.text.tokenizer import Tokenizer, tokenizer_from_gguf
from octavo.weights.gguf import GGUFFile

# More columns than tokens, and no multiple of 32.
VOCAB_SIZE = 49152 + 13
EOS_TOKEN_IDS = (2, 0)


@dataclass(frozen=True)
class Sampled:
    """text: what came; is_finished: an end token was drawn, or nothing but the end could come"""

    text: bytes
    token_ids: tuple[int, ...]
    is_finished: bool


Sample = Callable[..., Sampled]


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_gguf).metadata)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer, VOCAB_SIZE, EOS_TOKEN_IDS)


@pytest.fixture(scope="session")
def factory(vocabulary: Vocabulary) -> TokenGrammarFactory:
    return make_grammar_factory(vocabulary)


@pytest.fixture(scope="session")
def sample(factory: TokenGrammarFactory, tokenizer: Tokenizer) -> Sample:
    """Draws evenly from what is allowed; is_eager ends as soon as it may and likes to close."""

    def sample(spec: GrammarSpec, seed: int, max_tokens: int = 300, is_eager: bool = False) -> Sampled:
        validate_spec(spec)
        grammar = factory(spec)
        rng = random.Random(seed)
        mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
        token_ids: list[int] = []
        for _ in range(max_tokens):
            grammar.write_mask(mask)
            allowed = allowed_ids(mask)
            assert allowed, "nothing is allowed"
            assert max(allowed) < VOCAB_SIZE - 13
            ends = [token_id for token_id in allowed if token_id in EOS_TOKEN_IDS]
            assert len(ends) in (0, len(EOS_TOKEN_IDS)), "either every end token is allowed or none"
            assert bool(ends) == grammar.may_end
            if is_eager and ends:
                allowed = ends
            elif is_eager:
                closing = [i for i in allowed if tokenizer.token_bytes(i) in _CLOSING]
                allowed = closing if closing and rng.random() < 0.7 else allowed
            token_id = rng.choice(allowed)
            if token_id not in EOS_TOKEN_IDS:
                token_ids.append(token_id)
            grammar.accept(token_id)
            if token_id in EOS_TOKEN_IDS or grammar.is_complete:
                text = b"".join(map(tokenizer.token_bytes, token_ids))
                return Sampled(text, tuple(token_ids), True)
        return Sampled(b"".join(map(tokenizer.token_bytes, token_ids)), tuple(token_ids), False)

    return sample


_CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"]}", b"1")


def allowed_ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
