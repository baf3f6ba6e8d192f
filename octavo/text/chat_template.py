"""Messages to a prompt: the model's own jinja template, rendered in a sandbox, and from there to tokens.

The template is the only source of control tokens in a chat prompt. Markers such as <|im_end|> that stand in what the
client sent are ordinary text to the model: nobody can forge a turn.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequestError, UnsupportedModelError
from octavo.text.tokenizer import Tokenizer

# A template belongs to the model, but it is foreign code all the same. No real prompt is near this many characters.
MAX_PROMPT_CHARACTERS = 32 * 1024 * 1024

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenizer", "template"})

# Characters that nobody writes; they stand for the first character of a control marker while the template runs.
_PLACEHOLDERS = range(0xF0000, 0xFFFFE)
# And one for the end of a message that is to be continued.
_END_MARKS = range(0x100000, 0x10FFFE)


class ChatTemplate:
    """source: jinja, as in tokenizer_config.json. variables: what it may print, such as {"bos_token": "<s>"}.

    Raises UnsupportedModelError when the source is not a jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None):
        self.source = source
        self._variables = dict(variables or {})
        self._names: frozenset[str] | None = None
        try:
            self._template = _environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedModelError(
                f"The model's chat template cannot be read: line {error.lineno}: {error.message}"
            ) from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Raises InvalidRequestError when the model has none: completions work, chat does not."""
        if tokenizer.chat_template_source is None:
            raise InvalidRequestError(
                "This model has no chat template, so it cannot take messages; use /v1/completions with a prompt.",
                param="messages",
                code="no_chat_template",
            )
        return cls(tokenizer.chat_template_source, tokenizer.template_variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text, control markers written out.

        add_generation_prompt:  the prompt ends with the opening of the assistant's turn; by default it does, unless
                                the final message is continued
        continue_final_message: the prompt ends with the final message's text, for the model to go on with
        variables:              whatever else the template may ask for: tool_choice, enable_thinking, reasoning_effort

        Contents are brought to strings: None becomes "", text parts are joined with a newline. The arguments of tool
        calls, which the API sends as JSON text, are handed to the template as the objects that templates expect.
        Raises InvalidRequestError, with `messages` or one of them as param.
        """
        normal = self._normalize(messages)
        end = _mark_end(normal, tools, variables) if continue_final_message else ""
        text = self._render(normal, tools, _adds_prompt(add_generation_prompt, continue_final_message), variables)
        return _cut_at(text, end)

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template asks for, such as messages, tools, enable_thinking; functions are not among them."""
        if self._names is None:
            asked = jinja2.meta.find_undeclared_variables(_environment.parse(self.source))
            self._names = frozenset(asked) - frozenset(_environment.globals)
        return self._names

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Also maps the role developer, OpenAI's newer word for system, where the template does not know it."""
        normal = normalize_messages(messages)
        if "developer" not in self.source:
            for message in normal:
                if message["role"] == "developer":
                    message["role"] = "system"
        return normal

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        names = {
            **self._variables,
            **variables,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces = []
        num_characters = 0
        try:
            for piece in self._template.generate(**names):
                num_characters += len(piece)
                if num_characters > MAX_PROMPT_CHARACTERS:
                    _refuse(f"The model's chat template made more than {MAX_PROMPT_CHARACTERS} characters of them.")
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except _TemplateRefusalError as error:
            _refuse(f"The model's chat template refuses these messages: {error}", error)
        except RecursionError as error:
            _refuse("The model's chat template does not come to an end with these messages (it nests too deep).", error)
        except Exception as error:  # foreign code: whatever it raises, the request fails and nothing else
            _refuse(f"The model's chat template cannot render these messages: {error}", error)
        return "".join(pieces)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """The prompt's token ids; the arguments are those of `ChatTemplate.render`.

    No BOS is added beside what the template prints.

    Control markers inside messages, tools and variables are encoded as the text they are. To that end the first
    character of each is hidden while the template runs; the rendered text is cut at the real markers, and what lies
    between is encoded with the hidden characters back in place and marker recognition off.
    """
    normal = template._normalize(messages)
    end_mark = _mark_end(normal, tools, variables) if continue_final_message else ""
    request: dict[str, Any] = {
        "messages": normal,
        "tools": list(tools or ()),
        "variables": variables,
    }
    hider = _MarkerHider(tokenizer, _collect_strings(request))
    hidden = hider.hide(request)
    adds_prompt = _adds_prompt(add_generation_prompt, continue_final_message)
    rendered = template._render(hidden["messages"], hidden["tools"], adds_prompt, hidden["variables"])
    rendered = _cut_at(rendered, end_mark)
    if hider.num_hidden == 0:
        return tokenizer.encode(rendered, add_special_tokens=False)

    token_ids: list[int] = []
    position = 0
    _, markers = tokenizer.find_special_tokens(rendered)
    for start, end, token_id in [*markers, (len(rendered), len(rendered), None)]:
        if start > position:
            text = hider.restore(rendered[position:start])
            token_ids += tokenizer.encode_plain(text, is_continuation=position > 0)
        if token_id is not None:
            token_ids.append(token_id)
        position = end
    return token_ids


def check_template_variables(variables: Any, param: str = "chat_template_kwargs") -> dict[str, Any]:
    """What a client hands to the template itself. Raises InvalidRequestError for what is not the client's to set."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise InvalidRequestError(f"{param} must be an object of names and values for the chat template.", param=param)
    for name in variables:
        if name in _RESERVED or name.endswith("_token"):
            raise InvalidRequestError(
                f"{param}.{name} cannot be set; the server gives the chat template this value itself.",
                param=f"{param}.{name}",
            )
    return dict(variables)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies in the shape that templates expect; see ChatTemplate.render."""
    if not messages:
        _refuse("messages is empty, but a chat needs at least one message.")
    normal = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}] must be an object with a role and a content.", param=f"messages[{index}]"
            )
        copy = dict(message)
        copy["content"] = _join_content(copy.get("content"), f"messages[{index}].content")
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [_parse_tool_call(call) for call in copy["tool_calls"]]
        normal.append(copy)
    return normal


def _adds_prompt(add_generation_prompt: bool | None, continue_final_message: bool) -> bool:
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message are both true, but the prompt can end in one way only; "
            "set add_generation_prompt to false to continue the final message.",
            param="continue_final_message",
            value=True,
        )
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def _mark_end(messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any]) -> str:
    """Put a character that stands nowhere else at the end of the final message's text; it keeps the white space before
    it from a template that strips."""
    final = messages[-1]
    if final["role"] not in ("assistant", "user", "system") or final.get("tool_calls") or not final["content"]:
        raise InvalidRequestError(
            "continue_final_message is true, but the final message has no text to go on with.",
            param="continue_final_message",
            value=True,
        )
    taken = set().union(*_collect_strings([messages, list(tools or ()), variables]))
    end = next(chr(code) for code in _END_MARKS if chr(code) not in taken)
    final["content"] += end
    return end


def _cut_at(text: str, end: str) -> str:
    if not end:
        return text
    position = text.rfind(end)
    if position < 0:
        _refuse("The model's chat template does not write the final message's text, so it cannot be continued.")
    return text[:position]


def _join_content(content: Any, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError(f"{param} must be a string or a list of text parts.", param=param, value=content)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"{param}[{index}] has the type {kind!r}, but only text parts are supported.",
                param=f"{param}[{index}]",
                value=kind,
            )
        texts.append(text)
    return "\n".join(texts)


def _parse_tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"]) if function["arguments"].strip() else {}
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _collect_strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _collect_strings(part)]
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in _collect_strings(part)]
    return []


class _MarkerHider:
    """Replaces the first character of every control marker by a placeholder, and back."""

    def __init__(self, tokenizer: Tokenizer, strings: list[str]):
        """strings: all that will be hidden; no placeholder is a character of theirs."""
        self.num_hidden = 0
        self._markers = tokenizer.special_tokens
        # Most conversations have no character that begins a marker: then there is nothing to look for.
        present = [head for head in tokenizer.marker_lengths if any(head in text for text in strings)]
        self._lengths = {head: tokenizer.marker_lengths[head] for head in present}
        self._heads = re.compile("[" + re.escape("".join(present)) + "]") if present else None
        taken = set().union(*strings) if present else set()
        free = (chr(code) for code in _PLACEHOLDERS if chr(code) not in taken)
        self._placeholders = {head: next(free) for head in present}
        self._restore = str.maketrans({placeholder: head for head, placeholder in self._placeholders.items()})

    def hide(self, value: Any) -> Any:
        if self._heads is None:
            return value
        if isinstance(value, str):
            return self._heads.sub(self._hide_head, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(part) for part in value]
        return value

    def restore(self, text: str) -> str:
        return text.translate(self._restore)

    def _hide_head(self, match: re.Match[str]) -> str:
        head, start = match[0], match.start()
        # Also a marker inside another one is hidden: with the outer one broken, it would be found.
        if any(match.string[start : start + length] in self._markers for length in self._lengths[head]):
            self.num_hidden += 1
            return self._placeholders[head]
        return head


def _refuse(sentence: str, cause: Exception | None = None) -> None:
    raise InvalidRequestError(sentence, param="messages", code="chat_template_error") from cause


class _TemplateRefusalError(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own way to declare it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateRefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja's own filter, which escapes HTML: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox bounds range() but not 'a' * 10**12, which would take all memory at once."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and right > 64:
            raise jinja2.sandbox.SecurityError(f"{right} is too large an exponent")
        for repeated, times in ((left, right), (right, left)):
            is_repetition = isinstance(repeated, (str, list, tuple)) and isinstance(times, int)
            if operator == "*" and is_repetition and len(repeated) * times > MAX_PROMPT_CHARACTERS:
                raise jinja2.sandbox.SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _make_environment() -> ImmutableSandboxedEnvironment:
    # The settings that templates are written for (those of transformers).
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_environment = _make_environment()
