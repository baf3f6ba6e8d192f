"""SentencePiece BPE tokenizers (Llama 2, Mistral, Gemma) built from scored pieces; reads tokenizer.model files too.

SentencePiece merges, of all neighbours whose concatenation is a piece, those with the best-scored concatenation, the
leftmost on a tie. The `tokenizers` library merges by a ranked list of pairs. The two agree when every way to cut a
piece into two pieces is listed at the piece's rank: a text run alone decides which one of them it ever reaches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.text.byte_level_bpe import add_marked_tokens
from octavo.text.token_type import TokenType

# SentencePiece writes a space as this character inside its pieces.
SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceVocabulary:
    """tokens, scores, token_types: one each per id. A better piece has the higher score.

    adds_space_prefix: a space is put before the text, and one is taken off the decoded text again
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    token_types: Sequence[int]
    adds_space_prefix: bool


def build_sentencepiece_bpe(vocabulary: SentencePieceVocabulary) -> tokenizers.Tokenizer:
    tokens = vocabulary.tokens
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    unknown = next(
        (t for t, kind in zip(tokens, vocabulary.token_types, strict=True) if kind == TokenType.UNKNOWN), None
    )
    if unknown is None and "<unk>" in ids:
        unknown = "<unk>"
    library = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=_list_merges(vocabulary), byte_fallback=True, unk_token=unknown, fuse_unk=True)
    )
    space_to_mark = normalizers.Replace(" ", SPACE_MARK)
    decoder_steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space_prefix:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), space_to_mark])
        decoder_steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        library.normalizer = space_to_mark
    library.decoder = decoders.Sequence(decoder_steps)
    # Runs of spaces are tokens of Gemma; in its text a written-out mark is a space like any other. (With a space prefix
    # the library would put one before the token too.)
    spaces = "" if vocabulary.adds_space_prefix else " " + SPACE_MARK
    add_marked_tokens(library, tokens, vocabulary.token_types, normalized=spaces)
    return library


def _list_merges(vocabulary: SentencePieceVocabulary) -> list[tuple[str, str]]:
    """Every cut of every normal piece into two normal pieces, best piece first.

    Half a million pairs for Gemma, and the largest part of its loading time: hence the one flat loop, and the right
    half looked up first (it fails more often than the left).
    """
    normal = [
        (piece, score)
        for piece, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True)
        if kind == TokenType.NORMAL
    ]
    normal.sort(key=lambda entry: -entry[1])
    pieces = dict(normal)
    merges = []
    for piece in pieces:
        for cut in range(1, len(piece)):
            if piece[cut:] in pieces and (left := piece[:cut]) in pieces:
                merges.append((left, piece[cut:]))
    return merges


def read_sentencepiece_model(path: Path) -> SentencePieceVocabulary:
    """Read a tokenizer.model file (a protocol buffer).

    Raises CorruptFileError, and UnsupportedModelError for anything but BPE without text normalisation.
    """
    buffer = path.read_bytes()
    tokens: list[str] = []
    scores: list[float] = []
    token_types: list[int] = []
    model_type, charsmap, adds_space_prefix, removes_extra_spaces = 1, b"", True, True
    try:
        for number, value in _read_fields(buffer):
            if number == 1 and isinstance(value, bytes):  # a piece
                piece = dict(_read_fields(value))
                tokens.append(_as_bytes(piece[1]).decode("utf-8"))
                scores.append(struct.unpack("<f", _as_bytes(piece.get(2, b"\0\0\0\0")))[0])
                token_types.append(int(piece.get(3, TokenType.NORMAL)))
            elif number == 2 and isinstance(value, bytes):  # how it was trained
                model_type = int(dict(_read_fields(value)).get(3, 1))
            elif number == 3 and isinstance(value, bytes):  # how text is normalised
                rules = dict(_read_fields(value))
                charsmap = _as_bytes(rules.get(2, b""))
                adds_space_prefix = bool(rules.get(3, 1))
                removes_extra_spaces = bool(rules.get(4, 1))
    except (IndexError, KeyError, struct.error, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path} is not a SentencePiece model, or is damaged ({error}).") from error
    if not tokens:
        raise CorruptFileError(f"{path} holds no pieces; it is not a SentencePiece model, or is damaged.")
    if model_type != 2 or charsmap or removes_extra_spaces:
        raise UnsupportedModelError(
            f"{path} is not a plain BPE model (it is a unigram model, or it normalises text); only plain BPE models "
            "are read from tokenizer.model. Convert it to a tokenizer.json with transformers and put it beside."
        )
    return SentencePieceVocabulary(
        tokens=tokens, scores=scores, token_types=token_types, adds_space_prefix=adds_space_prefix
    )


def _read_fields(buffer: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (field number, value) pairs of one protocol buffer message; a value is an integer or raw bytes."""
    position = 0
    while position < len(buffer):
        tag, position = _read_varint(buffer, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _read_varint(buffer, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            size, position = _read_varint(buffer, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + size > len(buffer):
            raise ValueError("it ends inside a field")
        yield tag >> 3, buffer[position : position + size]
        position += size


def _read_varint(buffer: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where bytes belong")
    return value
