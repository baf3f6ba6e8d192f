"""What the server needs of an engine and a tokenizer. `octavo.engine.AsyncEngine` is one; a test brings its own.

The server's files name these protocols rather than the classes, so that importing the server pulls in no arrays.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any, Protocol

from octavo.core.interfaces import GrammarSpec
from octavo.core.sampling_params import SamplingParams
from octavo.engine.beam_search import BeamSearchParams
from octavo.engine.outputs import CompletionDelta


class ModelInfo(Protocol):
    """served_model_names: at least one; the first is the one that answers name. created: seconds since 1970."""

    @property
    def served_model_names(self) -> Sequence[str]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def created(self) -> int: ...


class TokenTexts(Protocol):
    """What a logprob entry shows of a token. strips_leading_space: see Tokenizer"""

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class EngineMetrics(Protocol):
    def render(self) -> bytes: ...


class ServingEngine(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def chat_template(self) -> Any: ...

    @property
    def metrics(self) -> EngineMetrics: ...

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prompt_param: str = "prompt") -> Any:
        """prompt_param: the field the prompt came from, for errors. Raises ClientError, EngineDeadError."""
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
        shown_token_ids: Collection[int] = (),
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Closing or cancelling the stream aborts the request."""
        ...

    def generate_best(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, best_of: int, **options: Any
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The params.n likeliest of best_of answers, each in one delta. options: of `generate`"""
        ...

    def beam_search(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The likeliest texts, best first, each in one delta."""
        ...

    async def prepare_grammar(self, spec: GrammarSpec, param: str = "response_format") -> None:
        """Compile it off the event loop. param: the field it came from. Raises InvalidRequestError."""
        ...

    def count_queued(self, num_more: int) -> int:
        """How many generations would wait for their turn, if so many more came now."""
        ...

    async def check_health(self, timeout_s: float) -> None: ...

    async def drain(self, timeout_s: float) -> Any: ...

    async def shutdown(self) -> None: ...
