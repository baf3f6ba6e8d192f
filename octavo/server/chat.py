"""`/v1/chat/completions`: messages through the model's chat template, and the answer as a message or its chunks."""

from __future__ import annotations

from octavo.server.answer import AnswerFormat
from octavo.server.api import ServingEngine
from octavo.server.chat_format import ChatFormat
from octavo.server.chat_prompt import ChatPrompter
from octavo.server.constraint import find_constraint
from octavo.server.endpoint import GeneratingEndpoint, unix_time
from octavo.server.exchange import Exchange
from octavo.server.fields import FieldReading
from octavo.server.generation import Generation
from octavo.server.protocol import ChatRequest, decode_chat_request
from octavo.server.settings import ServerSettings
from octavo.server.tool_constraint import constrain_answer


class ChatEndpoint(GeneratingEndpoint):
    id_prefix = "chatcmpl"

    def __init__(self, engine: ServingEngine, settings: ServerSettings, prompter: ChatPrompter):
        super().__init__(engine, settings)
        self._prompter = prompter

    async def begin(
        self, body: bytes, exchange: Exchange, key_salt: str
    ) -> tuple[Generation, AnswerFormat, ChatRequest]:
        request = self.read(decode_chat_request, body, exchange)
        answer_id = self.make_answer_id(exchange, request)
        model = self.pick_model(request.model)
        with request.own_names():
            params = request.sampling_params
        constraint = find_constraint(request)
        async with self.bound_text(request):
            prompt = await self._prompter.encode(request, is_bounded=request.truncate_prompt_tokens is None)
        if prompt.ignored:
            header = FieldReading(ignored=[*prompt.ignored]).make_ignored_header()
            exchange.response_headers.append((b"x-octavo-ignored-fields", header))
        constraint = await constrain_answer(self.engine, prompt, constraint)
        generation = self.make_generation(
            self.truncate([prompt.token_ids], request, params),
            request,
            params,
            prompt_param="messages",
            answer_id=answer_id,
            key_salt=key_salt,
            constraint=constraint,
            shown_token_ids=prompt.shown_token_ids,
        )
        format = ChatFormat(self.engine, answer_id, model, request, prompt, generation, unix_time())
        return generation, format, request
