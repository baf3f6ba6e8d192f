"""How one model writes calls and thinks aloud: found once from its template, asked for every request.

choice   = check_tool_choice(body.tool_choice, check_tools(body.tools))
messages = dialect.prepare(messages, choice)
prompt   = encode_chat(tokenizer, template, messages, tools=dialect.template_tools(choice), ...)
inside   = dialect.starts_inside(prompt)
grammar  = dialect.grammar(choice, inside)
pipeline = dialect.pipeline(choice, inside)     one for each choice of the answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.text.chat_template import ChatTemplate
from octavo.text.pipeline import ChatPipeline
from octavo.text.reasoning import (
    ReasoningMarkers,
    ReasoningSplitter,
    detect_reasoning,
    get_reasoning_markers,
    opens_reasoning,
)
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls.default_prompt import write_tools_into
from octavo.text.tool_calls.formats import MARKERS, detect_tool_format, find_marker_ids, get_format, get_parser
from octavo.text.tool_calls.grammar import tool_grammar
from octavo.text.tool_calls.history import adapt_history
from octavo.text.tool_calls.tools import ToolChoice

# As many of the prompt's last tokens are read to see whether it ends with the marker that opens reasoning.
_NUM_LAST_TOKENS = 16


class Dialect:
    """Immutable after its making; safe to share.

    tool_format:     "hermes", "llama3_json", "pythonic", "mistral" or "json"
    reasoning:       the markers of a model that thinks aloud, or None
    takes_tools:     the template writes the request's tools into the prompt; else a system message does
    shown_token_ids: special tokens that the detokenizer must write out (`IncrementalDetokenizer`), or no call and no
                     reasoning is found
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ):
        """tool_call_parser, reasoning_parser: names that overrule what the template tells; "none" turns reasoning off

        Raises ConfigError for an unknown name.
        """
        source = template.source if template is not None else None
        self._tokenizer = tokenizer
        self.takes_tools = template is not None and "tools" in template.variables
        self._takes_system = template is None or self.takes_tools or _takes_system(template)
        if tool_call_parser is not None:
            self.tool_format = get_format(tool_call_parser)
        else:
            self.tool_format = detect_tool_format(source, tokenizer.special_tokens) if self.takes_tools else "json"
        self.reasoning: ReasoningMarkers | None
        if reasoning_parser is None:
            self.reasoning = detect_reasoning(source)
        else:
            self.reasoning = None if reasoning_parser == "none" else get_reasoning_markers(reasoning_parser)
        special = tokenizer.special_tokens
        markers = (self.reasoning.start, self.reasoning.end) if self.reasoning is not None else ()
        self.shown_token_ids = find_marker_ids(self.tool_format, special) | {
            special[m] for m in markers if m in special
        }

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool = True
    ) -> list[dict[str, Any]]:
        """Messages as this model's template takes them. Check them before (`check_tool_history`)."""
        if self.takes_tools:
            return adapt_history(messages, self.tool_format)
        has_tools = choice.may_call or any(
            message.get("role") == "tool" or message.get("tool_calls") for message in messages
        )
        if not has_tools:
            return [dict(message) for message in messages]
        return write_tools_into(messages, choice, parallel, self._takes_system)

    def template_tools(self, choice: ToolChoice) -> list[dict[str, Any]] | None:
        """For the template's `tools`. With tool_choice "none" the model is not told of any."""
        return [tool.as_dict() for tool in choice.tools] if self.takes_tools and choice.may_call else None

    def grammar(
        self,
        choice: ToolChoice,
        starts_inside: bool = False,
        parallel: bool = True,
        *,
        follows_schemas: bool = True,
        has_form: bool = False,
    ) -> tuple[str, str] | None:
        """(kind, text) for a GrammarSpec, or None where the answer is free. The arguments are those of `tool_grammar`.

        Markers that are special tokens are named by their ids: as text they could not be written.
        """
        # In "auto" free text comes first anyway; but reasoning that is known to come is no place for calls.
        reasoning = self.reasoning if choice.must_call or has_form or starts_inside else None
        markers = MARKERS[self.tool_format] + ((reasoning.start, reasoning.end) if reasoning is not None else ())
        special = self._tokenizer.special_tokens
        return tool_grammar(
            self.tool_format,
            choice,
            parallel=parallel,
            marker_ids={marker: special[marker] for marker in markers if marker in special},
            reasoning=reasoning,
            starts_inside_reasoning=starts_inside,
            follows_schemas=follows_schemas,
            has_form=has_form,
        )

    def starts_inside(self, prompt_token_ids: Sequence[int]) -> bool:
        """The template has opened the reasoning in the prompt."""
        if self.reasoning is None:
            return False
        last = self._tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return opens_reasoning(last, self.reasoning)

    def leaves_open(self, text: str) -> bool:
        """An assistant's text that is to be continued ends in its reasoning."""
        if self.reasoning is None:
            return False
        return text.lstrip().startswith(self.reasoning.start) and self.reasoning.end not in text

    def pipeline(self, choice: ToolChoice, starts_inside: bool = False) -> ChatPipeline:
        """A fresh one for one choice of one answer."""
        splitter = None
        if self.reasoning is not None:
            splitter = ReasoningSplitter(self.reasoning, starts_inside)
        parser = get_parser(self.tool_format, choice.tool_names) if choice.may_call else None
        return ChatPipeline(splitter, parser, is_named=choice.mode == "named")


def _takes_system(template: ChatTemplate) -> bool:
    """Whether a system message gets into the prompt: some templates refuse it, some leave it out."""
    messages = [{"role": "system", "content": "octavo-asks"}, {"role": "user", "content": "x"}]
    try:
        return "octavo-asks" in template.render(messages)
    except InvalidRequestError:
        return False
