"""What the API process does about grammars: specs are checked here, off the event loop, before they are sent; and the
engine process, which has no tokenizer, gets the vocabulary before its first grammar. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from octavo.core.interfaces import GrammarSpec
from octavo.engine.messages import Command, SetVocabulary
from octavo.engine.run_in_thread import run_in_thread
from octavo.errors import InvalidRequestError
from octavo.structured.compile import validate_spec
from octavo.structured.vocabulary import Vocabulary, vocabulary_of
from octavo.text.tokenizer import Tokenizer

# A compilation takes up to some 100 ms of one core; the computing needs the others.
_MAX_COMPILATIONS = 2
_NUM_REMEMBERED = 64  # a spec has up to 256 KB


class GrammarDoor:
    def __init__(self, tokenizer: Tokenizer, send: Callable[[Command], None]):
        self._tokenizer = tokenizer
        self._send = send
        self._compiling = asyncio.Semaphore(_MAX_COMPILATIONS)
        self._checked: OrderedDict[GrammarSpec, None] = OrderedDict()
        self._model: tuple[int, tuple[int, ...]] = (0, ())
        self._vocabulary: Vocabulary | None = None
        self._is_sent = False

    def note_engine(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """A new engine process runs, and knows no vocabulary yet."""
        self._is_sent = False
        if self._model != (vocab_size, eos_token_ids):
            self._model = (vocab_size, eos_token_ids)
            self._vocabulary = None

    async def check(self, spec: GrammarSpec, param: str) -> None:
        """Raises InvalidRequestError(code="invalid_grammar"), with the API's field as its param."""
        if spec in self._checked:
            self._checked.move_to_end(spec)
        else:
            async with self._compiling:
                await run_in_thread(partial(validate_spec, spec, param))
            self._checked[spec] = None
            if len(self._checked) > _NUM_REMEMBERED:
                self._checked.popitem(last=False)
        while self._vocabulary is None:
            model = self._model
            try:
                vocabulary = await run_in_thread(partial(vocabulary_of, self._tokenizer, *model))
            except ValueError as error:
                raise InvalidRequestError(
                    f"This model's text cannot be constrained: {error}.", param=param, code="invalid_grammar"
                ) from error
            if model == self._model:  # else another engine process has come meanwhile
                self._vocabulary = vocabulary

    def send_vocabulary(self) -> None:
        """After `check`, right before a request with a grammar is sent."""
        if not self._is_sent:
            assert self._vocabulary is not None
            self._send(SetVocabulary(self._vocabulary))
            self._is_sent = True
