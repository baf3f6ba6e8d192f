"""Byte-level BPE tokenizers (GPT-2 and its heirs) built from a vocabulary and its merges.

A GGUF file carries the tokens and the merges, but of the pre-tokenizer (how text is cut before merging) only a name.
The table below says what each name means; the patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import UnsupportedModelError
from octavo.text.token_type import TokenType

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_LLAMA_3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN_2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merges are applied.

    pattern:           each match is a word of its own; None is GPT-2's own pattern
    splits_digits:     every digit is cut off first
    is_nfc:            the text is brought to Unicode's composed form first
    ignores_merges:    a word that is a token is that token, whatever the merges say
    adds_bos:          what the model does when the file does not say
    """

    pattern: str | None = None
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT_2 = PreTokenizer()
_DIGITS_THEN_GPT_2 = PreTokenizer(splits_digits=True)
_LLAMA_BPE = PreTokenizer(pattern=_LLAMA_3, ignores_merges=True, adds_bos=True)

# Keys: the values of tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT_2,
    "gpt-2": _GPT_2,
    "gpt2": _GPT_2,
    "phi-2": _GPT_2,
    "mpt": _GPT_2,
    "olmo": _GPT_2,
    "smollm": _DIGITS_THEN_GPT_2,
    "starcoder": _DIGITS_THEN_GPT_2,
    "refact": _DIGITS_THEN_GPT_2,
    "command-r": _DIGITS_THEN_GPT_2,
    "codeshell": _DIGITS_THEN_GPT_2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer(pattern=_LLAMA_3),
    "dbrx": PreTokenizer(pattern=_LLAMA_3),
    "qwen2": PreTokenizer(pattern=_QWEN_2, is_nfc=True),
    "deepseek-r1-qwen": PreTokenizer(pattern=_QWEN_2, is_nfc=True),
    "tekken": PreTokenizer(pattern=_TEKKEN, ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(pattern=_GPT_4O, ignores_merges=True),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Raises UnsupportedModelError, naming it and those we know."""
    known = PRE_TOKENIZERS.get(name)
    if known is None:
        raise UnsupportedModelError(
            f"The pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's Hugging Face folder, whose tokenizer.json says how "
            "text is cut."
        )
    return known


def build_byte_level_bpe(
    tokens: Sequence[str], token_types: Sequence[int], merges: Sequence[str], pre_tokenizer: PreTokenizer
) -> tokenizers.Tokenizer:
    """tokens, token_types: one each per id; merges: "left right", best first."""
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre_tokenizer.ignores_merges)
    )
    if pre_tokenizer.is_nfc:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = _build_pre_tokenizer(pre_tokenizer)
    library.decoder = decoders.ByteLevel()
    add_marked_tokens(library, tokens, token_types)
    return library


def add_marked_tokens(
    library: tokenizers.Tokenizer, tokens: Sequence[str], token_types: Sequence[int], normalized: str = ""
) -> None:
    """Tell the library which tokens are found in the text before anything else: control (special) and user-defined.

    normalized: user-defined tokens with one of these characters are found in the normalized text instead
    """
    special, ordinary = [], []
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif token_type == TokenType.USER_DEFINED:
            is_normalized = any(character in token for character in normalized)
            ordinary.append(AddedToken(token, normalized=is_normalized, special=False))
    library.add_special_tokens(special)
    library.add_tokens(ordinary)


def _build_pre_tokenizer(wanted: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if wanted.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if wanted.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(wanted.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=wanted.pattern is None))
    return pre_tokenizers.Sequence(steps)
