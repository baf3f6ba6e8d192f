"""`/v1/completions`: plain prompts, as texts or token ids, one or many, and the older shape of the answer."""

from __future__ import annotations

from typing import Any

from octavo.engine.outputs import CompletionDelta
from octavo.server.answer import AnswerFormat, Choice, encode_json
from octavo.server.api import ServingEngine
from octavo.server.endpoint import GeneratingEndpoint, unix_time
from octavo.server.exchange import Exchange
from octavo.server.generation import Generation
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.prompts import encode_prompts
from octavo.server.protocol import CompletionRequest, decode_completion_request


class CompletionEndpoint(GeneratingEndpoint):
    id_prefix = "cmpl"

    async def begin(
        self, body: bytes, exchange: Exchange, key_salt: str
    ) -> tuple[Generation, AnswerFormat, CompletionRequest]:
        request = decode_completion_request(body)
        answer_id = self.make_answer_id(exchange, request)
        model = self.pick_model(request.model)
        with request.own_names():
            params = request.sampling_params
        prompts = await encode_prompts(self.engine, request.prompts)
        generation = Generation(
            self.engine,
            prompts,
            params,
            request_id=answer_id,
            priority=request.priority,
            cache_salt=request.join_salt(key_salt),
        )
        with request.own_names():
            generation.validate("prompt")
        format = CompletionFormat(self.engine, answer_id, model, request, generation, unix_time())
        return generation, format, request


class CompletionFormat(AnswerFormat):
    def __init__(
        self,
        engine: ServingEngine,
        answer_id: str,
        model: str,
        request: CompletionRequest,
        generation: Generation,
        created: int,
    ):
        head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        super().__init__(head, "text_completion", request, generation)
        num_choices = generation.num_choices
        self._logprobs: list[CompletionLogprobs] | None = None
        if request.logprobs is not None:
            self._logprobs = [CompletionLogprobs(engine.tokenizer, request.logprobs) for _ in range(num_choices)]

    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        start = self.chunk_head + b'{"index":%d,"text":' % delta.index
        logprobs = b"null"
        if self._logprobs is not None and delta.logprobs:
            logprobs = encode_json(self._logprobs[delta.index].add(delta.logprobs))
        end = (b',"logprobs":', logprobs, b",", self.encode_reasons(delta), b"}", self.end_chunk())
        return b"".join((start, encode_json(delta.text), *end))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None if self._logprobs is None else self._logprobs[index].add(choice.logprobs),
        }
