"""An engine for one command in the terminal: started with a progress line, asked, shut down whatever happens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from octavo.cli.progress import ProgressLine
from octavo.config import EngineArgs, check_args
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import InvalidRequestError, RequestFailedError
from octavo.text.chat_template import encode_chat


class Session:
    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._num_requests = 0

    @property
    def model(self) -> str:
        return self._engine.info.served_model_names[0]

    def encode_text(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        template = self._engine.chat_template
        if template is None:
            raise InvalidRequestError("This model has no chat template; use `octavo generate` with a plain prompt.")
        return encode_chat(self._engine.tokenizer, template, messages, add_generation_prompt=True)

    async def answer(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[str, None]:
        """The answer to a conversation, as `stream` gives it."""
        async with aclosing(self.stream(self.encode_messages(messages), params)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[str, None]:
        """The answer's text as it comes. Closing it aborts. Raises ClientError, RequestFailedError."""
        self._engine.validate(prompt_token_ids, params)
        self._num_requests += 1
        stream = self._engine.generate(prompt_token_ids, params, request_id=f"cli-{self._num_requests}")
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if delta.finish_reason in ("error", "abort"):
                    raise RequestFailedError(delta.error or "The engine could not finish this answer.")
                if delta.text:
                    yield delta.text


def make_engine_args(**typed: Any) -> EngineArgs:
    """For one user: the cache is as large as one sequence needs, unless more was asked for. Raises ConfigError."""
    args = EngineArgs(**{"max_num_seqs": 1, **typed})
    check_args(args)
    return args


def run_session(args: EngineArgs, use: Callable[[Session], Awaitable[int]]) -> int:
    """Start an engine, use it, shut it down. The exit status is what `use` returns."""

    async def run() -> int:
        progress = ProgressLine(sys.stderr)
        try:
            engine = await AsyncEngine.start(args, on_progress=progress.show)
        finally:
            progress.clear()
        try:
            return await use(Session(engine))
        finally:
            await engine.shutdown()

    return asyncio.run(run())
