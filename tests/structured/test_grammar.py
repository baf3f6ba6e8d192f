"""The state of a sequence and the masks of a batch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.structured.digit_cap import DigitCap, DigitMasks
from octavo.structured.grammar import MaskWriter, TokenGrammarFactory, make_grammar_factory
from octavo.structured.vocabulary import Vocabulary, vocabulary_of
from octavo.text.tokenizer import Tokenizer
from tests.structured.conftest import EOS_TOKEN_IDS, VOCAB_SIZE, allowed_ids

NUM_WORDS = -(-VOCAB_SIZE // 32)


class LetterTokenizer:
    """Tokens 0 to 25 are letters, 26 an end token that is not marked as special, 27 is empty, 28 a control token."""

    vocab_size = 29

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((97 + token_id,)) if token_id < 26 else {26: b"</s>", 27: b"", 28: b"x"}[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == 28


def test_the_vocabulary_gives_back_every_token(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    tokens = vocabulary.tokens()
    assert len(tokens) == VOCAB_SIZE
    assert all(tokens[i] == tokenizer.token_bytes(i) for i in range(0, tokenizer.vocab_size, 97))
    assert set(tokens[tokenizer.vocab_size :]) == {b""}
    assert set(EOS_TOKEN_IDS) <= set(vocabulary.special_token_ids)


def test_the_vocabulary_may_be_smaller_than_the_tokenizer() -> None:
    vocabulary = vocabulary_of(LetterTokenizer(), 10, [3, 26])
    assert vocabulary.tokens() == [bytes((97 + i,)) for i in range(10)]
    assert vocabulary.eos_token_ids == (3,)


def test_a_vocabulary_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="no end token below 10"):
        vocabulary_of(LetterTokenizer(), 10, [26])


def test_end_control_and_empty_tokens_are_no_text() -> None:
    grammar = make_grammar_factory(vocabulary_of(LetterTokenizer(), 40, [26]))(GrammarSpec("regex", "[a-z</>]{2,3}"))
    mask = np.full(2, -1, np.int32)
    grammar.write_mask(mask)
    assert allowed_ids(mask) == list(range(26))
    grammar.accept(23)
    grammar.accept(24)
    grammar.write_mask(mask)
    assert allowed_ids(mask) == [*range(26), 26]
    assert grammar.may_end
    assert not grammar.is_complete
    grammar.accept(0)
    grammar.write_mask(mask)
    assert allowed_ids(mask) == [26]
    assert grammar.is_complete
    grammar.accept(26)
    assert grammar.is_complete


def test_a_token_that_was_not_allowed_is_our_mistake(factory: TokenGrammarFactory) -> None:
    grammar = factory(GrammarSpec("choice", '["yes"]'))
    with pytest.raises(ValueError, match="was not allowed by the choice grammar"):
        grammar.accept(EOS_TOKEN_IDS[0])


def test_states_of_one_spec_are_independent(factory: TokenGrammarFactory, tokenizer: Tokenizer) -> None:
    spec = GrammarSpec("choice", '["ab", "cd"]')
    first, second = factory(spec), factory(spec)
    mask = np.zeros(NUM_WORDS, np.int32)
    first.write_mask(mask)
    first.accept(tokenizer.encode("ab", add_special_tokens=False)[0])
    second.write_mask(mask)
    assert {tokenizer.token_bytes(i) for i in allowed_ids(mask)} == {b"a", b"ab", b"c", b"cd"}


def test_the_vocabulary_is_loaded_at_the_first_grammar_and_once() -> None:
    calls = []

    def load() -> Vocabulary:
        calls.append(1)
        return vocabulary_of(LetterTokenizer(), 29, [26])

    factory = make_grammar_factory(load)
    assert not calls
    factory(GrammarSpec("regex", "a"))
    factory(GrammarSpec("regex", "b"))
    assert len(calls) == 1


def test_the_factory_refuses_a_bad_spec(factory: TokenGrammarFactory) -> None:
    with pytest.raises(InvalidRequestError):
        factory(GrammarSpec("regex", "["))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_masks_of_a_batch_are_those_of_each(factory: TokenGrammarFactory, num_threads: int) -> None:
    specs = [GrammarSpec("json_object"), GrammarSpec("regex", "[0-9]+"), GrammarSpec("choice", '["a", "b"]')]
    alone = []
    for spec in specs:
        mask = np.zeros(NUM_WORDS, np.int32)
        factory(spec).write_mask(mask)
        alone.append(mask)
    masks = np.full((5, NUM_WORDS), 7, np.int32)
    rows = [3, 0, 4]
    failures = MaskWriter(num_threads).write(
        [(factory(spec), row) for spec, row in zip(specs, rows, strict=True)], masks
    )
    assert failures == {}
    for mask, row in zip(alone, rows, strict=True):
        assert np.array_equal(masks[row], mask)
    assert (masks[[1, 2]] == 7).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_grammar_at_its_limits_fails_alone(factory: TokenGrammarFactory, num_threads: int) -> None:
    hostile = factory(GrammarSpec("regex", "(.*a.{18}x|.*b.{19}y|.*c.{17}z|.*(d|e).{20}){1,50}"))
    masks = np.zeros((2, NUM_WORDS), np.int32)
    failures = MaskWriter(num_threads).write([(hostile, 0), (factory(GrammarSpec("regex", "a")), 1)], masks)
    assert set(failures) == {0}
    assert "too large or too complex" in failures[0]
    assert masks[1].any()


TOKENS = [b"7", b"77", b"777", b"a", b".", b"e5", b"1e999", b'"']


def masked(text: bytes, allowed: list[int]) -> list[int]:
    cap = DigitCap(DigitMasks(TOKENS, len(TOKENS)))
    cap.accept(text)
    mask = np.array([sum(1 << i for i in allowed)], np.int32)
    cap.apply(mask)
    return allowed_ids(mask)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (b"[", [0, 1, 2, 3, 4, 5, 7]),
        (b"[" + b"1" * 14, [0, 1, 3, 4, 5, 7]),
        (b"[" + b"1" * 15, [0, 3, 4, 5, 7]),
        (b"[" + b"1" * 16, [3, 4, 5, 7]),
        (b"[" + b"1" * 16 + b".", [0, 1, 2, 3, 4, 5, 7]),
        (b"[" + b"1" * 16 + b", 2", [0, 1, 2, 3, 4, 5, 7]),
        (b"[0." + b"1" * 16, [3, 4, 5, 7]),
        (b"[1e", [0, 1, 3, 4, 5, 7]),
        (b"[1E+12", [3, 4, 5, 7]),
        (b'["' + b"1" * 40, [0, 1, 2, 3, 4, 5, 6, 7]),
        (b'["\\"' + b"1" * 40, [0, 1, 2, 3, 4, 5, 6, 7]),
        (b'["\\\\", ' + b"1" * 16, [3, 4, 5, 7]),
        (b"[true, 1", [0, 1, 2, 3, 4, 5, 7]),
    ],
)
def test_digits_are_capped_in_numbers_only(text: bytes, left: list[int]) -> None:
    assert masked(text, list(range(len(TOKENS)))) == left


def test_a_digit_that_must_come_stays() -> None:
    assert masked(b"1" * 30, [0, 2]) == [0, 2]


def test_specs_cross_a_process_boundary() -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "null"}))
    assert hash(spec) == hash(GrammarSpec(spec.kind, str(spec.text)))
