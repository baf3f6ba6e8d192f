"""An engine that says what it is told to: exact deltas, faults at chosen places, generations that never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from octavo.core.interfaces import GrammarSpec, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.beam_search import BeamSearchParams
from octavo.engine.best_of import BestOf, widen_params
from octavo.engine.outputs import CompletionDelta
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.structured.compile import validate_spec
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_byte_tokenizer() -> Tokenizer:
    """The real class over a vocabulary of bytes: token id = byte, and 256 is the control token <end>."""
    # GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 and up.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    return Tokenizer(library, eos_token_ids=(256,))


TOKENIZER = make_byte_tokenizer()


@dataclass(frozen=True)
class FakeInfo:
    model: str = "fake"
    served_model_names: tuple[str, ...] = ("fake", "also-fake")
    max_model_len: int = 128
    vocab_size: int = 257
    created: int = 1700000000


@dataclass
class Call:
    """What the engine was asked, and how it ended."""

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str
    grammar: GrammarSpec | None = None
    shown_token_ids: frozenset[int] = frozenset()
    is_aborted: bool = False
    is_finished: bool = False


class FakeMetrics:
    def render(self) -> bytes:
        return b"octavo:num_requests_running 0\n"


Script = Callable[[SamplingParams], Sequence["CompletionDelta | Exception | None"]]


def say(*texts: str, finish_reason: str = "stop", num_cached: int = 0) -> Script:
    """One delta a text, one token each, for each of the n generations; the last text's delta finishes."""

    def script(params: SamplingParams) -> list[CompletionDelta | Exception | None]:
        deltas: list[CompletionDelta | Exception | None] = []
        for number, text in enumerate(texts):
            is_last = number == len(texts) - 1
            for index in range(params.n):
                deltas.append(
                    CompletionDelta(
                        index=index,
                        text=text,
                        token_ids=[number],
                        logprobs=make_logprobs(text, params),
                        finish_reason=finish_reason if is_last else None,
                        num_cached_tokens=num_cached,
                        is_final=is_last and index == params.n - 1,
                    )
                )
        return deltas

    return script


def make_logprobs(text: str, params: SamplingParams) -> list[TokenLogprobs]:
    """The text's first byte as the token, and the next bytes of the alphabet as alternatives, each less likely."""
    if params.logprobs is None:
        return []
    token_id = text.encode("utf-8")[0]
    top = tuple((token_id + rank, -0.5 * (rank + 1)) for rank in range(params.logprobs))
    return [TokenLogprobs(token_id, -0.5, top)]


@dataclass
class FakeEngine:
    """script: the deltas to yield; an exception among them is raised; None waits for ever (until aborted)."""

    script: Script = field(default_factory=lambda: say("Hel", "lo"))
    chat_template: ChatTemplate | None = field(default_factory=lambda: ChatTemplate(CHAT_TEMPLATE))
    info: FakeInfo = field(default_factory=FakeInfo)
    is_dead: bool = False
    num_queued: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = TOKENIZER
        self.metrics = FakeMetrics()
        self.calls: list[Call] = []
        self.prepared: list[GrammarSpec] = []
        self.beam_searches: list[BeamSearchParams] = []
        self.aborted = asyncio.Event()
        self.waiting = asyncio.Event()
        self.drained_with: list[float] = []
        self._shutting_down = asyncio.Event()
        self.is_shut_down = False

    def validate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prompt_param: str = "prompt"
    ) -> None:
        if any(not 0 <= token_id < self.info.vocab_size for token_id in prompt_token_ids):
            raise InvalidRequestError(f"{prompt_param} holds a token id outside the vocabulary.", param=prompt_param)
        if len(prompt_token_ids) >= self.info.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {len(prompt_token_ids)} tokens, but max_model_len is {self.info.max_model_len}.",
                param=prompt_param,
                code="context_length_exceeded",
            )

    async def generate(
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
        call = Call(
            list(prompt_token_ids), params, request_id, priority, cache_salt, grammar, frozenset(shown_token_ids)
        )
        self.calls.append(call)
        try:
            for step in self.script(params):
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    self.waiting.set()
                    await self._shutting_down.wait()
                    raise EngineDeadError("The server is shutting down.", code="shutting_down")
                await asyncio.sleep(0)
                yield step
            call.is_finished = True
        finally:
            if not call.is_finished:
                call.is_aborted = True
                self.aborted.set()

    async def prepare_grammar(self, spec: GrammarSpec, param: str = "response_format") -> None:
        """The real check, without the vocabulary."""
        validate_spec(spec, param)
        self.prepared.append(spec)

    async def generate_best(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, best_of: int, **options: Any
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The real choice among what the script says."""
        best = BestOf(params)
        async for delta in self.generate(prompt_token_ids, widen_params(params, best_of), **options):
            best.push(delta)
        for delta in best.pick():
            yield delta

    async def beam_search(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, **options: Any
    ) -> AsyncGenerator[CompletionDelta, None]:
        """As many beams as the script has generations."""
        self.beam_searches.append(params)
        sampling = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens)
        async for delta in self.generate(prompt_token_ids, sampling, **options):
            yield delta

    def count_queued(self, num_more: int) -> int:
        return self.num_queued + num_more - 1

    async def check_health(self, timeout_s: float) -> None:
        if self.is_dead:
            raise EngineDeadError("The engine process died and is being started again.")

    async def drain(self, timeout_s: float) -> bool:
        self.drained_with.append(timeout_s)
        try:
            await asyncio.wait_for(self._is_empty(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        self.is_shut_down = True
        self._shutting_down.set()

    async def _is_empty(self) -> None:
        while any(not call.is_finished and not call.is_aborted for call in self.calls):
            await asyncio.sleep(0.001)
