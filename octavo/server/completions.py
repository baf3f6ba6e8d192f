"""`/v1/completions`: plain prompts, as texts or token ids, one or many, and the older shape of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.engine.outputs import CompletionDelta
from octavo.server.answer import AnswerFormat, Choice, encode_json
from octavo.server.api import ServingEngine
from octavo.server.constraint import find_constraint
from octavo.server.endpoint import GeneratingEndpoint, unix_time
from octavo.server.exchange import Exchange
from octavo.server.generation import Generation
from octavo.server.logprobs import CompletionLogprobs, join_lists
from octavo.server.prompts import encode_prompts
from octavo.server.protocol import CompletionRequest, decode_completion_request


class CompletionEndpoint(GeneratingEndpoint):
    id_prefix = "cmpl"

    async def begin(
        self, body: bytes, exchange: Exchange, key_salt: str
    ) -> tuple[Generation, AnswerFormat, CompletionRequest]:
        request = self.read(decode_completion_request, body, exchange)
        answer_id = self.make_answer_id(exchange, request)
        model = self.pick_model(request.model)
        with request.own_names():
            params = request.sampling_params
        constraint = find_constraint(request)
        async with self.bound_text(request):
            encoded = await encode_prompts(
                self.engine,
                request.prompts,
                add_special_tokens=request.add_special_tokens,
                is_bounded=request.truncate_prompt_tokens is None,
            )
        prompts = self.truncate(encoded, request, params)
        generation = self.make_generation(
            prompts,
            request,
            params,
            prompt_param="prompt",
            answer_id=answer_id,
            key_salt=key_salt,
            constraint=constraint,
        )
        echoes: list[str] = []
        if request.echo:
            echoes = [
                # What was sent, if all of it went to the model; it may be written in other ways than tokens would.
                sent if isinstance(sent, str) and len(prompt) == len(whole) else self._decode(prompt, request)
                for sent, whole, prompt in zip(request.prompts, encoded, prompts, strict=True)
            ]
        format = CompletionFormat(self.engine, answer_id, model, request, generation, echoes, unix_time())
        return generation, format, request

    def _decode(self, prompt: Sequence[int], request: CompletionRequest) -> str:
        text: str = self.engine.tokenizer.decode(prompt, request.skip_special_tokens)
        return text


class CompletionFormat(AnswerFormat):
    """echoes: one text a prompt, or none at all"""

    tells_prompt_in_choices = True

    def __init__(
        self,
        engine: ServingEngine,
        answer_id: str,
        model: str,
        request: CompletionRequest,
        generation: Generation,
        echoes: Sequence[str],
        created: int,
    ):
        head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        super().__init__(head, "text_completion", engine.tokenizer, request, generation)
        self._echoes = echoes
        self._logprobs: list[CompletionLogprobs] | None = None
        if request.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(
                    engine.tokenizer,
                    request.logprobs,
                    skips_special_tokens=request.skip_special_tokens,
                    shows_ids=request.return_tokens_as_token_ids,
                )
                for _ in range(generation.num_choices)
            ]

    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        start = self.chunk_head + b'{"index":%d,"text":' % delta.index
        text = delta.text
        is_echoing = bool(self._echoes) and not choice.has_begun
        if is_echoing:
            text = self._echoes[self.prompt_number(delta.index)] + text
        logprobs = b"null"
        if self._logprobs is not None and (delta.logprobs or is_echoing):
            logprobs = encode_json(self._make_logprobs(delta.index, delta.logprobs, is_echoing))
        reasons = self.encode_reasons(delta)
        choice.has_begun = True
        return b"".join((start, encode_json(text), b',"logprobs":', logprobs, b",", reasons, b"}", self.end_chunk()))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echoes[self.prompt_number(index)] if self._echoes else ""
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._make_logprobs(index, choice.logprobs, bool(self._echoes))
        return {"index": index, "text": echo + "".join(choice.texts), "logprobs": logprobs}

    def _make_logprobs(self, index: int, generated: Sequence[Any], is_echoing: bool) -> dict[str, Any]:
        assert self._logprobs is not None
        logprobs = self._logprobs[index]
        if not is_echoing:
            return logprobs.add(generated)
        number = self.prompt_number(index)
        prompt, scored = self._generation.prompts[number], self._scored_prompts[number]
        of_prompt = logprobs.add_prompt(prompt, scored, self._echoes[number])
        return join_lists(of_prompt, logprobs.add(generated))
