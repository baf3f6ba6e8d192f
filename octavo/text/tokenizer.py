"""The model's tokenizer: text to token ids and back, loaded from a Hugging Face folder or from GGUF metadata.

Wraps the `tokenizers` library. Decoding is done here, on bytes: a token is a run of bytes, and text is the bytes of all
tokens read as UTF-8, where what is not UTF-8 becomes U+FFFD by Python's rule. So a stream decodes to the same text as a
whole.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers, processors

from octavo.errors import CorruptFileError, InvalidRequestError, UnsupportedModelError
from octavo.text.byte_level_bpe import build_byte_level_bpe, find_pre_tokenizer
from octavo.text.sentencepiece_bpe import (
    SPACE_MARK,
    SentencePieceVocabulary,
    build_sentencepiece_bpe,
    read_sentencepiece_model,
)
from octavo.text.token_type import TokenType

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Control tokens that end a turn although many files name only the end-of-text token as eos.
_END_OF_TURN_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


class Tokenizer:
    """Text to ids and back; immutable, and safe to use from several threads.

    vocab_size:           ids are below it (the model may have more rows: those ids decode to nothing)
    bos_token_id:         the beginning-of-sequence token, or None
    eos_token_ids:        tokens that end a generation; the tokenizer's own first
    adds_bos:             encode(text) starts with bos_token_id
    special_tokens:       text to id of every control token
    marker_lengths:       first character of a control token's text to the lengths of those that begin with it
    template_variables:   what a chat template may print, such as {"bos_token": "<s>"}
    chat_template_source: the model's jinja template, or None
    strips_leading_space: decoded text loses one leading space (SentencePiece's space prefix)
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        template_variables: Mapping[str, str] | None = None,
        chat_template_source: str | None = None,
        adds_bos: bool | None = None,
    ):
        """adds_bos: None keeps what the library's post-processor does.

        Raises UnsupportedModelError for a decoder we cannot turn into bytes.
        """
        if adds_bos is not None and bos_token_id is not None:
            _set_bos(library, bos_token_id if adds_bos else None)
        self._library = library
        self._plain_libraries: dict[bool, tokenizers.Tokenizer] = {}
        self._added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self._is_byte_level, self.strips_leading_space = _read_decoder(library)
        self._token_bytes: dict[int, bytes] = {}

        self.vocab_size = max(library.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_tokens = {self._added[token_id].content: token_id for token_id in sorted(self._special_ids)}
        self.marker_lengths: dict[str, set[int]] = {}
        for text in self.special_tokens:
            self.marker_lengths.setdefault(text[:1], set()).add(len(text))
        self.template_variables = dict(template_variables or {})
        self.chat_template_source = chat_template_source
        self.adds_bos = bos_token_id is not None and library.encode("a").ids[:1] == [bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Control markers written in the text become control tokens; add_special_tokens puts the model's BOS before."""
        return _encode(self._library, text, add_special_tokens).ids

    def encode_plain(self, text: str, is_continuation: bool = False) -> list[int]:
        """Encode with control markers as the ordinary text they are, and without BOS.

        is_continuation: the text follows other text, so a tokenizer that marks the start of a text must not do so
        """
        return _encode(self._plain_library(is_continuation), text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True, is_continuation: bool = False) -> str:
        """is_continuation: the tokens go on from a prompt, so the first one keeps its leading space."""
        special_ids: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in special_ids)
        if self.strips_leading_space and not is_continuation:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token stands for; a special token's are its text; an id without a token has none."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._read_token_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """For showing: bytes that are no whole character become U+FFFD. `token_bytes` tells such tokens apart."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    @functools.cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters of a text than this."""
        # Byte-level spellings have a character for each byte, so for them it is rather too large.
        return max(map(len, self._library.get_vocab(with_added_tokens=True)), default=1)

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        return self._library.token_to_id(token)

    def find_special_tokens(self, text: str) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Encode, and tell where control markers stand in the text.

        Returns the ids, and for each marker (start, end, token_id): text[start:end] is the marker together with the
        white space that it swallows, if it is one that does.
        """
        encoding = _encode(self._library, text, add_special_tokens=False)
        found = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._special_ids and self._added[token_id].content in text[start:end]:
                found.append((start, end, token_id))
        return encoding.ids, found

    def _read_token_bytes(self, token_id: int) -> bytes:
        # The library raises OverflowError for what is not an unsigned 32-bit number.
        token = self._library.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode("utf-8")
        if self._is_byte_level:
            if token_id in self._added:
                return token.encode("utf-8")
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode("utf-8")
        byte_token = _BYTE_TOKEN.fullmatch(token)
        if byte_token:
            return bytes((int(byte_token[1], 16),))
        return token.replace(SPACE_MARK, " ").encode("utf-8")

    def _plain_library(self, is_continuation: bool) -> tokenizers.Tokenizer:
        """A twin of the library that takes control markers for text. Two threads may both make one; either will do."""
        found = self._plain_libraries.get(is_continuation)
        if found is None:
            found = _copy_library(self._library)
            found.encode_special_tokens = True
            if is_continuation:
                _stop_marking_the_start(found)
            self._plain_libraries[is_continuation] = found
        return found


def load_tokenizer_folder(path: Path) -> Tokenizer:
    """Read tokenizer.json (or a SentencePiece tokenizer.model) and what lies beside it.

    Raises CorruptFileError for a damaged file, UnsupportedModelError when there is no tokenizer we can use.
    """
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    adds_bos = config.get("add_bos_token")
    if (path / "tokenizer.json").is_file():
        library = _read_tokenizer_json(path / "tokenizer.json")
    elif (path / "tokenizer.model").is_file():
        library = build_sentencepiece_bpe(read_sentencepiece_model(path / "tokenizer.model"))
        adds_bos = True if adds_bos is None else adds_bos
    else:
        raise UnsupportedModelError(
            f"{path} has neither tokenizer.json nor tokenizer.model, so its text cannot be tokenized. Copy the "
            "model's tokenizer.json into the folder."
        )

    variables = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    bos_token_id = _find_id(library, variables.get("bos_token"))
    eos_token_ids = [_find_id(library, variables.get("eos_token")), *_read_generation_eos(path)]
    return Tokenizer(
        library,
        bos_token_id=bos_token_id,
        eos_token_ids=[token_id for token_id in eos_token_ids if token_id is not None],
        template_variables=variables,
        chat_template_source=_read_chat_template(path, config),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer from a GGUF file's metadata (tokenizer.ggml.*, tokenizer.chat_template).

    add_eos_token is not followed: a prompt that ends with the end token has nothing to go on with.
    Raises CorruptFileError for missing or unfitting entries, UnsupportedModelError for a kind we do not know.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _read_list(metadata, "tokenizer.ggml.tokens")
    token_types = _read_list(metadata, "tokenizer.ggml.token_type", default=[int(TokenType.NORMAL)] * len(tokens))
    _check_length("tokenizer.ggml.token_type", token_types, tokens)
    if kind == "gpt2":
        pre_tokenizer = find_pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")))
        merges = _read_list(metadata, "tokenizer.ggml.merges")
        try:
            library = build_byte_level_bpe(tokens, token_types, merges, pre_tokenizer)
        except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
            raise CorruptFileError(f"The vocabulary of the GGUF file does not fit together: {error}.") from error
        adds_bos = pre_tokenizer.adds_bos
    elif kind == "llama":
        scores = _read_list(metadata, "tokenizer.ggml.scores")
        _check_length("tokenizer.ggml.scores", scores, tokens)
        if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
            raise UnsupportedModelError(
                "The tokenizer removes extra white space (tokenizer.ggml.remove_extra_whitespaces), which is not "
                "supported. Use the model's Hugging Face folder."
            )
        adds_space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        library = build_sentencepiece_bpe(
            SentencePieceVocabulary(
                tokens=tokens, scores=scores, token_types=token_types, adds_space_prefix=adds_space_prefix
            )
        )
        adds_bos = True
    else:
        raise UnsupportedModelError(
            f"The tokenizer kind {kind!r} (tokenizer.ggml.model) is not supported; supported are 'gpt2' (byte-level "
            "BPE) and 'llama' (SentencePiece BPE)."
        )

    named = {
        name: _read_token_id(metadata, f"tokenizer.ggml.{key}_token_id", tokens)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    end_ids = [_read_token_id(metadata, f"tokenizer.ggml.{key}_token_id", tokens) for key in ("eos", "eot", "eom")]
    for text in _END_OF_TURN_TEXTS:
        token_id = library.token_to_id(text)
        if token_id is not None and token_types[token_id] == TokenType.CONTROL:
            end_ids.append(token_id)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        library,
        bos_token_id=named["bos"],
        eos_token_ids=[token_id for token_id in end_ids if token_id is not None],
        template_variables={f"{name}_token": tokens[i] for name, i in named.items() if i is not None},
        chat_template_source=template if isinstance(template, str) and template else None,
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
    )


def _encode(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """Raises InvalidRequestError for text that is not Unicode; all other text has tokens."""
    try:
        text.encode("utf-8")  # versions of the library differ in what they make of it
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "The text holds half of a surrogate pair (U+D800 to U+DFFF), which is no character and has no UTF-8 form."
        ) from error
    return library.encode(text, add_special_tokens=add_special_tokens)


def _read_decoder(library: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(tokens are byte-level, one leading space is stripped), from the library's own description of its decoder."""
    decoder = _describe(library.decoder)
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    strips = any(
        (step.get("type") == "Strip" and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False, strips
    raise UnsupportedModelError(
        f"The tokenizer's decoder ({', '.join(map(str, kinds))}) is not supported; supported are byte-level BPE and "
        "SentencePiece tokenizers."
    )


def _describe(part: Any) -> dict[str, Any]:
    """A part of the library (decoder, pre-tokenizer) as the dict it has in tokenizer.json."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _copy_library(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second library that shares the model, which is the large part, and has the same added tokens."""
    copy = tokenizers.Tokenizer(library.model)
    if library.normalizer is not None:
        copy.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        copy.pre_tokenizer = library.pre_tokenizer
    added = library.get_added_tokens_decoder()
    in_order = [added[token_id] for token_id in sorted(added)]
    copy.add_special_tokens([token for token in in_order if token.special and copy.token_to_id(token.content) is None])
    copy.add_tokens(in_order)
    if copy.get_added_tokens_decoder().keys() != added.keys() or any(
        copy.token_to_id(token.content) != token_id for token_id, token in added.items()
    ):
        # The ids have gaps that adding in order does not reproduce. Slower, but always right.
        return tokenizers.Tokenizer.from_str(library.to_str())
    return copy


def _stop_marking_the_start(library: tokenizers.Tokenizer) -> None:
    """Metaspace with the scheme "first" marks only the start of a whole text, which a continuation is not."""
    description = _describe(library.pre_tokenizer)
    if description.get("type") == "Metaspace" and description.get("prepend_scheme") == "first":
        library.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=description["replacement"], prepend_scheme="never", split=description.get("split", True)
        )


def _set_bos(library: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
    starts_with = library.encode("a").ids[:1]
    if bos_token_id is None:
        if len(library.encode("a")) != len(library.encode("a", add_special_tokens=False)):
            library.post_processor = processors.ByteLevel(trim_offsets=False)  # one that adds nothing
    elif starts_with != [bos_token_id]:
        bos = library.id_to_token(bos_token_id)
        library.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_token_id)])


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CorruptFileError(f"{path} cannot be read as a tokenizer: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path} holds a {type(content).__name__}, where a JSON object belongs.")
    return content


def _read_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes before tokenizer_config.json; of several named templates the one named "default"."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) and template else None


def _read_generation_eos(path: Path) -> list[int]:
    """The end tokens of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        content = _read_json(path / name)
        for section in (content, content.get("text_config")):
            eos = section.get("eos_token_id") if isinstance(section, dict) else None
            if eos is not None:
                return [token_id for token_id in (eos if isinstance(eos, list) else [eos]) if isinstance(token_id, int)]
    return []


def _find_id(library: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else library.token_to_id(token)


def _read_list(metadata: Mapping[str, Any], key: str, default: list[Any] | None = None) -> Sequence[Any]:
    value = metadata.get(key, default)
    if value is None:
        raise CorruptFileError(f"The GGUF file has no {key}, so it has no usable tokenizer.")
    # NumPy arrays come as plain numbers, which are several times faster to walk.
    return value.tolist() if hasattr(value, "tolist") else value


def _check_length(key: str, values: Sequence[Any], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise CorruptFileError(f"{key} has {len(values)} entries, but there are {len(tokens)} tokens.")


def _read_token_id(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if not 0 <= int(token_id) < len(tokens):
        raise CorruptFileError(f"{key} is {token_id}, but there are only {len(tokens)} tokens.")
    return int(token_id)


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 and up (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in printable):
        table[chr(0x100 + index)] = byte
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
