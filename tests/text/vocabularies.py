"""Tiny vocabularies in the form that GGUF metadata has them, and as files of a Hugging Face folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentencepiece_metadata(pieces: list[str], **changes: Any) -> dict[str, Any]:
    """<unk> 0, <s> 1, </s> 2, <|im_start|> 3, <|im_end|> 4, the 256 bytes, then the pieces, best first."""
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    types = [UNKNOWN] + [CONTROL] * 4
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    tokens += pieces
    types += [NORMAL] * len(pieces)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 261 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


# Pieces with several ways to be put together, and with whole words.
PIECES = ["▁t", "he", "▁the", "in", "ing", "▁▁", "▁▁▁▁", "ab", "ba", "aba", "abab", "bab", "aa", "aaa", "▁a", "é", "日"]
PIECES += list("▁abcdefghijklmnopqrstuvwxyz,.!?'<>|_/")


def byte_characters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """<|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, the bytes, then a few merges."""
    merges = ["t h", "th e", "Ġ the", "Ã ©", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_characters()]
    tokens += [merge.replace(" ", "") for merge in merges]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHATML,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def write_byte_level_folder(folder: Path, **config: Any) -> Path:
    """tokenizer.json with the bytes, then <s> 256, </s> 257, <|im_start|> 258, <|im_end|> 259; and its config."""
    library = Library(models.BPE(vocab={c: i for i, c in enumerate(byte_characters())}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    )
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_sentencepiece_model(
    path: Path, metadata: dict[str, Any], *, model_type: int = 2, adds_space_prefix: bool = True
) -> None:
    """The protocol buffer of a tokenizer.model file."""
    buffer = b""
    for token, score, kind in zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    ):
        piece = _bytes_field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _int_field(3, kind)
        buffer += _bytes_field(1, piece)
    buffer += _bytes_field(2, _int_field(3, model_type) + _int_field(35, 1))
    buffer += _bytes_field(3, _bytes_field(1, b"identity") + _int_field(3, int(adds_space_prefix)) + _int_field(4, 0))
    path.write_bytes(buffer)


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))
