"""The state of one sequence's constrained decoding, and the factory that makes them for one vocabulary."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from octavo.core.interfaces import Grammar, GrammarSpec
from octavo.errors import InvalidRequestError, RequestFailedError
from octavo.structured.compile import TOOL_CALLS, compile_grammar, explain, grammar_text, is_limit
from octavo.structured.digit_cap import DigitCap, DigitMasks
from octavo.structured.vocabulary import Vocabulary

Mask = npt.NDArray[np.int32]

# Compiled grammars kept, each some 100 KB and more as its lexer's states are met.
_CACHE_SIZE = 64
# All JSON, or with nothing beside it that has quotes or digits of its own.
_JSON_KINDS = ("json_schema", "json_object", TOOL_CALLS)


class TokenGrammar:
    """A `Grammar`. Not safe for several threads at once; `write_masks` gives each thread a grammar of its own."""

    __slots__ = ("_digit_cap", "_matcher", "_tokens", "spec")

    def __init__(self, matcher: LLMatcher, spec: GrammarSpec, tokens: Sequence[bytes], digit_cap: DigitCap | None):
        self._matcher = matcher
        self._tokens = tokens
        self._digit_cap = digit_cap
        self.spec = spec

    def write_mask(self, mask: Mask) -> None:
        """mask: [ceil(vocab_size / 32)] int32, contiguous, all words written. At least one bit is set.

        Raises RequestFailedError when going on would cost more than the limits on a step allow.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._finish_mask(mask)

    def accept(self, token_id: int) -> None:
        """Raises ValueError for a token that the mask did not allow, RequestFailedError as `write_mask` does."""
        if not self._matcher.consume_token(token_id):
            message = self._matcher.get_error()
            if is_limit(message):
                raise RequestFailedError(explain(self.spec, message), code="grammar_failed")
            raise ValueError(f"token {token_id} was not allowed by the {self.spec.kind} grammar: {message[:300]}")
        if self._digit_cap is not None:
            self._digit_cap.accept(self._tokens[token_id])

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """The text so far satisfies the grammar, whether or not it can go on."""
        return self._matcher.is_accepting()

    def _finish_mask(self, mask: Mask) -> None:
        if self._matcher.is_error():
            raise RequestFailedError(explain(self.spec, self._matcher.get_error()), code="grammar_failed")
        if self._digit_cap is not None:
            self._digit_cap.apply(mask)


class TokenGrammarFactory:
    """A `GrammarFactory` for one vocabulary. The first call builds what is needed of the vocabulary (SmolLM2 0.3 s,
    Gemma's 262,144 tokens 2 s); `prepare` does so ahead of time, from any thread.

    load_vocabulary: called once
    """

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]):
        self._load_vocabulary = load_vocabulary
        self._lock = threading.Lock()
        self._tables: _Tables | None = None
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        with self._lock:
            if self._tables is None:
                self._tables = _Tables(self._load_vocabulary())

    def __call__(self, spec: GrammarSpec) -> TokenGrammar:
        self.prepare()
        assert self._tables is not None
        matcher = self._compile(spec, self._tables.tokenizer).deep_copy()
        digit_cap = DigitCap(self._tables.digit_masks) if spec.kind in _JSON_KINDS else None
        return TokenGrammar(matcher, spec, self._tables.tokens, digit_cap)

    def _compile(self, spec: GrammarSpec, tokenizer: LLTokenizer) -> LLMatcher:
        found = self._compiled.get(spec)
        if found is None:
            found = compile_grammar(grammar_text(spec), tokenizer)
            if found.is_error():
                raise InvalidRequestError(
                    explain(spec, found.get_error()), param="response_format", code="invalid_grammar"
                )
            self._compiled[spec] = found
            if len(self._compiled) > _CACHE_SIZE:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(spec)
        return found


def make_grammar_factory(vocabulary: Vocabulary | Callable[[], Vocabulary]) -> TokenGrammarFactory:
    """vocabulary: or what loads it, called at the first grammar"""
    return TokenGrammarFactory(vocabulary if callable(vocabulary) else lambda: vocabulary)


class MaskWriter:
    """Writes the masks of a batch, in parallel where that pays."""

    def __init__(self, num_threads: int = 1):
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None

    def write(self, grammars: Sequence[tuple[Grammar, int]], masks: Mask) -> dict[int, str]:
        """grammars: each with the row it is for; masks: [num_rows, ceil(vocab_size / 32)] int32, contiguous, those rows
        written, the others left.

        Returns row to a sentence for each grammar that cannot go on; its sequence has to end with an error.
        """
        assert masks.dtype == np.int32, masks.dtype
        assert masks.flags["C_CONTIGUOUS"], masks.strides
        failures = {}
        is_parallel = self._executor is not None and len(grammars) > 1
        if is_parallel:
            matchers = [(grammar._matcher, row) for grammar, row in grammars if isinstance(grammar, TokenGrammar)]
            assert len(matchers) == len(grammars), "only grammars of this module can be written together"
            assert self._executor is not None
            num_rows, num_words = masks.shape
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, num_words * 4, num_rows)
        for grammar, row in grammars:
            try:
                if is_parallel:
                    assert isinstance(grammar, TokenGrammar)
                    grammar._finish_mask(masks[row])
                else:
                    grammar.write_mask(masks[row])
            except RequestFailedError as error:
                failures[row] = error.message
        return failures


class _Tables:
    """What is made of a vocabulary once."""

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = vocabulary.tokens()
        self.digit_masks = DigitMasks(self.tokens, vocabulary.vocab_size)
        self.tokenizer = LLTokenizer(
            cast(Any, _TokenizerForLibrary(self.tokens, vocabulary)),
            n_vocab=vocabulary.vocab_size,
            eos_token=list(vocabulary.eos_token_ids),
        )


class _TokenizerForLibrary:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], vocabulary: Vocabulary):
        self.tokens = tokens
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = list(vocabulary.special_token_ids)

    def __call__(self, text: Any) -> list[int]:
        # Only for text that a grammar forces, and ours force none.
        raise AssertionError(f"a grammar has forced {text!r}")
