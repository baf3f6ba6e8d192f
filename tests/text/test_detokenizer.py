"""Text that comes token by token is the text of the whole, and no chunk ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer, tokenizer_from_gguf
from octavo.weights.gguf import GGUFFile
from tests.text.vocabularies import PIECES, byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata())
BYTE_FALLBACK = tokenizer_from_gguf(sentencepiece_metadata(PIECES))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_gguf).metadata)


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool, is_continuation: bool = False) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, is_continuation)
    return [detokenizer.push(chunk) for chunk in chunks] + [detokenizer.finish()]


def check_equals_whole(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool, is_continuation: bool) -> None:
    whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip, is_continuation)
    assert "".join(stream(tokenizer, chunks, skip, is_continuation)) == whole


@given(st.lists(st.lists(st.integers(0, 49152), max_size=3)), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chunks_join_to_the_text_of_all_tokens(smollm2: Tokenizer, chunks: list[list[int]], skip: bool) -> None:
    check_equals_whole(smollm2, chunks, skip, is_continuation=False)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(data=st.data(), skip=st.booleans(), is_continuation=st.booleans())
@settings(max_examples=300, deadline=None)
def test_chunks_of_broken_bytes_join_to_the_text_of_all_tokens(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, is_continuation: bool
) -> None:
    ids = st.integers(0, tokenizer.vocab_size)
    check_equals_whole(tokenizer, data.draw(st.lists(st.lists(ids, max_size=3))), skip, is_continuation)


@given(st.text(min_size=1))
@settings(max_examples=200, deadline=None)
def test_whole_text_streams_without_replacement_characters_and_without_delay(text: str) -> None:
    token_ids = BYTE_LEVEL.encode_plain(text)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, True)
    sent, seen = "", b""
    for token_id in token_ids:
        seen += BYTE_LEVEL.token_bytes(token_id)
        sent += detokenizer.push([token_id])
        assert sent == seen.decode("utf-8", "ignore"), "every whole character is out, and nothing of the next one"
    assert detokenizer.finish() == ""
    assert sent == text


def test_a_character_in_two_tokens_comes_out_once_and_whole(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("ďábelské")
    chunks = stream(smollm2, [[token_id] for token_id in token_ids], skip=True)
    assert chunks[:2] == ["", "ď"]
    assert "".join(chunks) == "ďábelské"


def test_a_broken_character_is_replaced_as_soon_as_it_is_certain() -> None:
    pepper = [BYTE_FALLBACK.token_id(f"<0x{byte:02X}>") for byte in "🌶".encode()]
    a = BYTE_FALLBACK.token_id("a")
    assert stream(BYTE_FALLBACK, [[pepper[0]], [pepper[1]], [a]], skip=True) == ["", "", "\ufffda", ""]
    assert stream(BYTE_FALLBACK, [[pepper[0], pepper[1]]], skip=True) == ["", "\ufffd"]


def test_the_space_prefix_is_dropped_at_the_start_only() -> None:
    the = BYTE_FALLBACK.token_id("▁the")
    start = BYTE_FALLBACK.special_tokens["<s>"]
    assert stream(BYTE_FALLBACK, [[the], [the]], skip=True) == ["the", " the", ""]
    assert stream(BYTE_FALLBACK, [[start, the], [the]], skip=True) == ["the", " the", ""]
    assert stream(BYTE_FALLBACK, [[start, the]], skip=False) == ["<s> the", ""]
    assert stream(BYTE_FALLBACK, [[the], [the]], skip=True, is_continuation=True) == [" the", " the", ""]
