"""From a chat request to the prompt that the model gets, and to how its answer is read: for chats and for `/tokenize`.

What the fields say about tools, reasoning and the template is checked here, once, and handed to `octavo.text`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from octavo.errors import InvalidRequestError, UnsupportedModelError
from octavo.server.api import ServingEngine
from octavo.server.decoding import shorten_json
from octavo.server.prompts import encode_messages
from octavo.server.settings import ServerSettings
from octavo.text.chat_template import ChatTemplate, check_template_variables
from octavo.text.dialect import Dialect
from octavo.text.pipeline import ChatPipeline
from octavo.text.tool_calls.tools import ToolChoice, check_tool_choice, check_tools

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_TEMPLATE_CHARS = 256 * 1024
_MAX_KEPT_TEMPLATES = 8
_NO_CHOICE = ToolChoice("none")


class ChatFields(Protocol):
    """What ChatRequest and TokenizeRequest have in common; messages are checked already."""

    messages: Any
    tools: list[Any] | None
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning_effort: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    add_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """token_ids:     the prompt
    starts_inside: the answer goes on with reasoning that the prompt has opened
    ignored:       fields that this model's template does not look at, of a request to a lenient server
    """

    token_ids: list[int]
    dialect: Dialect
    choice: ToolChoice
    is_parallel: bool
    starts_inside: bool
    ignored: tuple[str, ...] = ()

    @property
    def shown_token_ids(self) -> frozenset[int]:
        return self.dialect.shown_token_ids if self.needs_pipeline else frozenset()

    @property
    def needs_pipeline(self) -> bool:
        """The answer may hold something besides text."""
        return self.choice.may_call or self.dialect.reasoning is not None

    def make_pipeline(self) -> ChatPipeline:
        """For one choice of the answer."""
        return self.dialect.pipeline(self.choice, self.starts_inside)


class ChatPrompter:
    """Belongs to one server. The model's dialect is found once; those of templates that requests bring are kept."""

    def __init__(self, engine: ServingEngine, settings: ServerSettings):
        """Raises UnsupportedModelError for a --chat-template that cannot be read, ConfigError for unknown parsers."""
        self._engine = engine
        self._settings = settings
        self._template: ChatTemplate | None = engine.chat_template
        if settings.chat_template is not None:
            self._template = ChatTemplate(settings.chat_template, engine.tokenizer.template_variables)
        self._dialect = self._make_dialect(self._template)
        self._others: OrderedDict[str, tuple[ChatTemplate, Dialect]] = OrderedDict()

    async def encode(self, request: ChatFields, *, is_bounded: bool = True) -> ChatPrompt:
        """is_bounded: refuse what cannot fit in max_model_len before it is tokenized. Raises InvalidRequestError."""
        template, dialect = self._pick_template(request.chat_template)
        choice = _NO_CHOICE
        if request.tools is not None or request.tool_choice is not None:
            choice = check_tool_choice(request.tool_choice, check_tools(request.tools))
        messages = dialect.prepare(request.messages, choice, request.parallel_tool_calls)
        tools = dialect.template_tools(choice)
        ignored: list[str] | None = [] if self._settings.is_lenient else None
        token_ids = await encode_messages(
            self._engine,
            template,
            messages,
            num_other_chars=len(json.dumps(tools)) if tools else 0,
            add_special_tokens=bool(request.add_special_tokens),
            is_bounded=is_bounded,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            tools=tools,
            variables=read_variables(request, template.variables, ignored),
        )
        starts_inside = dialect.starts_inside(token_ids)
        if request.continue_final_message and messages[-1]["role"] == "assistant":
            starts_inside = dialect.leaves_open(messages[-1]["content"])
        return ChatPrompt(token_ids, dialect, choice, request.parallel_tool_calls, starts_inside, tuple(ignored or ()))

    def _pick_template(self, source: str | None) -> tuple[ChatTemplate, Dialect]:
        if source is None:
            if self._template is None:
                raise InvalidRequestError(
                    "This model has no chat template, so it cannot take messages; send a prompt to /v1/completions, or "
                    "start the server with --chat-template.",
                    param="messages",
                    code="no_chat_template",
                )
            return self._template, self._dialect
        if not self._settings.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template is not allowed on this server, which was started without "
                "--trust-request-chat-template; leave it out.",
                param="chat_template",
                code="unsupported_field",
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            _refuse(
                "chat_template", f"chat_template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are taken."
            )
        if source not in self._others:
            try:
                template = ChatTemplate(source, self._engine.tokenizer.template_variables)
            except UnsupportedModelError as error:
                _refuse("chat_template", str(error).replace("The model's chat template", "chat_template"))
            self._others[source] = template, self._make_dialect(template)
            if len(self._others) > _MAX_KEPT_TEMPLATES:
                self._others.popitem(last=False)
        self._others.move_to_end(source)
        return self._others[source]

    def _make_dialect(self, template: ChatTemplate | None) -> Dialect:
        settings = self._settings
        return Dialect(self._engine.tokenizer, template, settings.tool_call_parser, settings.reasoning_parser)


def read_variables(request: ChatFields, known: frozenset[str], ignored: list[str] | None) -> dict[str, Any]:
    """What the request hands to the template besides messages and tools. known: the names that the template asks for.

    ignored: takes the names of what the template would not look at; None refuses it. Raises InvalidRequestError.
    """
    sent = check_template_variables(request.chat_template_kwargs)
    variables = {}
    for name, value in sent.items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name in known:
            variables[name] = value
        elif ignored is not None:
            ignored.append(where)
        else:
            _refuse(where, f"{where} is not read by this model's chat template, {_list_names(known)}.", "unknown_field")
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in REASONING_EFFORTS:
            words = ", ".join(REASONING_EFFORTS)
            _refuse("reasoning_effort", f"reasoning_effort is {shorten_json(effort)}, but it must be one of {words}.")
        if _is_read("reasoning_effort", known, ignored, _explain_effort(known)):
            variables.setdefault("reasoning_effort", effort)
    if request.documents:
        documents = _check_documents(request.documents)
        if _is_read("documents", known, ignored, "put them into a message"):
            variables["documents"] = documents
    return variables


def _is_read(name: str, known: frozenset[str], ignored: list[str] | None, way_out: str) -> bool:
    if name in known:
        return True
    if ignored is None:
        _refuse(
            name,
            f"{name} is not supported: this model's chat template has no such variable; {way_out}.",
            "unsupported_field",
        )
    ignored.append(name)
    return False


def _explain_effort(known: frozenset[str]) -> str:
    if "enable_thinking" in known:
        return 'leave it out, or send chat_template_kwargs {"enable_thinking": false} or true'
    return "leave it out"


def _check_documents(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for index, document in enumerate(documents):
        for name, value in document.items():
            if not isinstance(value, str):
                where = f"documents[{index}].{name[:64]}"
                _refuse(where, f"{where} is {shorten_json(value)}, but it must be a string.", "invalid_type")
    return [dict(document) for document in documents]


def _list_names(known: frozenset[str]) -> str:
    own = sorted(known - {"messages", "tools", "add_generation_prompt", "documents"})
    own = [name for name in own if not name.endswith("_token")]
    return f"which reads {', '.join(own)}" if own else "which reads no variables"


def _refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequestError(message, param=param, code=code)
