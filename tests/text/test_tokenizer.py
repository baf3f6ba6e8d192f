"""Tokenizers from GGUF metadata and from folders: exact ids, exact bytes, control tokens only where they belong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.text.tokenizer import Tokenizer, load_tokenizer_folder, tokenizer_from_gguf
from octavo.weights.gguf import GGUFFile
from tests.text.vocabularies import (
    CHATML,
    PIECES,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
    write_byte_level_folder,
    write_sentencepiece_model,
)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(gemma3_gguf).metadata)


def test_smollm2_has_the_reference_ids_and_texts(smollm2: Tokenizer, golden_smollm2: dict[str, Any]) -> None:
    for case in golden_smollm2["cases"]:
        if case["kind"] == "text":
            assert smollm2.encode(case["input"]) == case["prompt_token_ids"]
        assert smollm2.decode(case["output_token_ids"]) == case["text"]
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.adds_bos) == (1, (2,), False)
    assert smollm2.vocab_size == 49152


def test_gemma3_has_the_reference_ids_and_texts(gemma3: Tokenizer, golden_gemma3: dict[str, Any]) -> None:
    for case in golden_gemma3["cases"]:
        assert gemma3.encode(case["input"]) == case["prompt_token_ids"]
        assert gemma3.decode(case["output_token_ids"]) == case["text"]
    # <end_of_turn> ends an answer although the file names only <eos>.
    assert (gemma3.bos_token_id, gemma3.eos_token_ids, gemma3.adds_bos) == (2, (1, 106), True)
    assert gemma3.vocab_size == 262144


def test_gemma3_equals_sentencepiece(gemma3: Tokenizer, gemma3_gguf: Path) -> None:
    metadata = GGUFFile(gemma3_gguf).metadata
    sentencepiece = sentencepiece_of(metadata, adds_space_prefix=False)
    for text in odd_texts(500):
        assert gemma3.encode_plain(text) == sentencepiece.encode(text), text


@pytest.mark.parametrize("adds_space_prefix", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_scored_pieces_merge_as_sentencepiece_merges_them(seed: int, adds_space_prefix: bool) -> None:
    order = random.Random(seed).sample(PIECES, len(PIECES))
    metadata = sentencepiece_metadata(order, add_space_prefix=adds_space_prefix)
    tokenizer = tokenizer_from_gguf(metadata)
    sentencepiece = sentencepiece_of(metadata, adds_space_prefix)
    for text in odd_texts(200):
        token_ids = tokenizer.encode_plain(text)
        assert token_ids == sentencepiece.encode(text), text
        assert tokenizer.decode(token_ids) == text.replace("▁", " ")


def sentencepiece_of(metadata: dict[str, Any], adds_space_prefix: bool) -> Any:
    """The same vocabulary in Google's own library."""
    library = pytest.importorskip("sentencepiece")
    model = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    for token, score, kind in zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    ):
        # GGUF files hold user-defined pieces with real spaces.
        piece = token.replace(" ", "▁") if kind == USER_DEFINED else token
        model.pieces.add(piece=piece, score=score, type=2 if token == "<unk>" else kind)
    tokens = metadata["tokenizer.ggml.tokens"]
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    for name in ("unk", "bos", "eos"):
        key = "unknown" if name == "unk" else name
        token_id = metadata[f"tokenizer.ggml.{key}_token_id"]
        setattr(model.trainer_spec, f"{name}_id", token_id)
        setattr(model.trainer_spec, f"{name}_piece", tokens[token_id])
    model.trainer_spec.pad_id = -1
    model.normalizer_spec.add_dummy_prefix = adds_space_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return library.SentencePieceProcessor(model_proto=model.SerializeToString())


def odd_texts(count: int) -> list[str]:
    rng = random.Random(0)
    parts = [
        *"abcthein .,!?\n\t▁é日😀<>|_-'",
        "the ",
        "ing",
        "aba",
        "abab",
        "aaaa",
        "  ",
        "    ",
        "\n\n",
        "</b>",
        "\u0301",
    ]
    texts = ["", " ", "  a", "a  ", "▁▁a", "a" * 33, "ab" * 17, "👩‍👩‍👧‍👦 🌶️", "\x01", "<0x41>", "\ufeffx", "\r\n\r\n"]
    return texts + ["".join(rng.choices(parts, k=rng.randrange(1, 25))) for _ in range(count)]


def test_a_byte_fallback_vocabulary_gives_every_text_back() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(PIECES))
    token_ids = tokenizer.encode("the ůň 🌶")
    assert token_ids[0] == tokenizer.bos_token_id
    assert b"".join(tokenizer.token_bytes(i) for i in token_ids[1:]) == " the ůň 🌶".encode()
    assert tokenizer.decode(token_ids) == "the ůň 🌶"
    assert tokenizer.decode(token_ids[1:], is_continuation=True) == " the ůň 🌶"


def test_control_markers_are_tokens_in_a_prompt_and_text_in_plain_text() -> None:
    for tokenizer in (tokenizer_from_gguf(byte_level_metadata()), tokenizer_from_gguf(sentencepiece_metadata(PIECES))):
        marker = tokenizer.special_tokens["<|im_end|>"]
        text = "a<|im_end|>b"
        assert marker in tokenizer.encode(text)
        plain = tokenizer.encode_plain(text)
        assert not any(tokenizer.is_special(token_id) for token_id in plain)
        assert tokenizer.decode(plain) == text
        assert marker in tokenizer.encode(text), "encode_plain left the tokenizer changed"


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_plain_text_is_encoded_the_same_either_way(text: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    if not any(marker in text for marker in tokenizer.special_tokens):
        assert tokenizer.encode_plain(text) == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_token_bytes_are_exact_also_for_parts_of_characters(smollm2: Tokenizer) -> None:
    # U+010F is C4 8F, which SmolLM2 has as two tokens; shown as text both are U+FFFD, as bytes they differ.
    token_ids = smollm2.encode("ď")
    assert [smollm2.token_bytes(token_id) for token_id in token_ids] == [b"\xc4", b"\x8f"]
    assert [smollm2.token_text(token_id) for token_id in token_ids] == ["\ufffd", "\ufffd"]
    assert smollm2.token_bytes(2) == b"<|im_end|>"


def test_an_id_without_a_token_has_no_bytes() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    assert [tokenizer.token_bytes(i) for i in (tokenizer.vocab_size, 10**9, 2**40, -1)] == [b"", b"", b"", b""]


def test_special_tokens_are_left_out_of_the_text_on_request() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    token_ids = tokenizer.encode("the<|im_end|>the")
    assert tokenizer.decode(token_ids) == "thethe"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "the<|im_end|>the"


def test_the_pre_tokenizer_decides_what_is_merged() -> None:
    assert len(tokenizer_from_gguf(byte_level_metadata(pre="gpt-2")).encode("12")) == 1
    assert len(tokenizer_from_gguf(byte_level_metadata(pre="smollm")).encode("12")) == 2
    # The Kelvin sign is a K by Unicode's composition, which Qwen applies before anything else.
    assert tokenizer_from_gguf(byte_level_metadata(pre="qwen2")).encode("\u212a") == [
        tokenizer_from_gguf(byte_level_metadata()).token_id("K")
    ]


def test_bos_is_added_as_the_file_says_or_else_as_the_family_does() -> None:
    def first_id(**changes: Any) -> int:
        return tokenizer_from_gguf(byte_level_metadata(**changes)).encode("a")[0]

    bos = 0
    assert first_id(add_bos_token=True) == bos
    assert first_id(add_bos_token=False, pre="llama-bpe") != bos
    assert first_id(pre="llama-bpe") == bos
    assert first_id() != bos
    assert tokenizer_from_gguf(sentencepiece_metadata(PIECES)).encode("", add_special_tokens=False) == []
    assert tokenizer_from_gguf(sentencepiece_metadata(PIECES)).encode("") == [1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pre": "klingon"}, "klingon"),
        ({"model": "rwkv"}, "rwkv"),
    ],
)
def test_an_unknown_kind_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        tokenizer_from_gguf(byte_level_metadata(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"merges": None},
        {"merges": ["t zz"]},
        {"token_type": [1, 1]},
        {"eos_token_id": 10**6},
    ],
)
def test_metadata_that_does_not_fit_together_is_a_corrupt_file(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptFileError):
        tokenizer_from_gguf(byte_level_metadata(**change))


def test_a_folder_is_read_with_its_config(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path, chat_template=CHATML, add_bos_token=True)
    tokenizer = load_tokenizer_folder(folder)
    assert tokenizer.encode("a") == [256, *tokenizer.encode("a", add_special_tokens=False)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (256, (257,), True)
    assert tokenizer.template_variables == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template_source == CHATML
    assert tokenizer.special_tokens == {"<s>": 256, "</s>": 257, "<|im_start|>": 258, "<|im_end|>": 259}


def test_the_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}), encoding="utf-8")
    assert load_tokenizer_folder(folder).eos_token_ids == (257, 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 257]}), encoding="utf-8")
    assert load_tokenizer_folder(folder).eos_token_ids == (257, 259)


def test_of_several_chat_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_byte_level_folder(tmp_path, chat_template=named)
    assert load_tokenizer_folder(folder).chat_template_source == "D"
    (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert load_tokenizer_folder(folder).chat_template_source == "J"
    assert load_tokenizer_folder(write_byte_level_folder(tmp_path / "none")).chat_template_source is None


@pytest.mark.parametrize("adds_space_prefix", [True, False])
def test_a_tokenizer_model_file_reads_like_the_same_vocabulary_in_gguf(tmp_path: Path, adds_space_prefix: bool) -> None:
    metadata = sentencepiece_metadata(PIECES, add_space_prefix=adds_space_prefix)
    write_sentencepiece_model(tmp_path / "tokenizer.model", metadata, adds_space_prefix=adds_space_prefix)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8")
    from_folder, from_gguf = load_tokenizer_folder(tmp_path), tokenizer_from_gguf(metadata)
    for text in odd_texts(100):
        assert from_folder.encode(text) == from_gguf.encode(text)


def test_a_tokenizer_model_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_sentencepiece_model(tmp_path / "tokenizer.model", sentencepiece_metadata(PIECES), model_type=1)
    with pytest.raises(UnsupportedModelError, match="unigram"):
        load_tokenizer_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03\x0a\x7fa"])
def test_a_damaged_tokenizer_model_file_is_a_corrupt_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CorruptFileError):
        load_tokenizer_folder(tmp_path)


def test_a_damaged_tokenizer_json_is_a_corrupt_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ', encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        load_tokenizer_folder(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        load_tokenizer_folder(tmp_path)
