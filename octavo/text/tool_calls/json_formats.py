"""Calls as JSON objects: between Hermes' markers, after Llama 3's tag, in Mistral's ways, or bare."""

from __future__ import annotations

from collections.abc import Callable, Collection

from octavo.text.tool_calls.call_id import new_mistral_call_id
from octavo.text.tool_calls.parser import JsonCallParser, Steps


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or more: Hermes, Qwen and their like."""

    heads = "<"

    def _call(self) -> Steps:
        if self._character != "<":
            return (yield from self._plain())
        if not (yield from self._literal("<tool_call>")):
            return False
        self._closer = "</tool_call>"
        yield from self._skip_space()
        return (yield from self._object_or_list(is_marked=True))


class Llama3JsonParser(JsonCallParser):
    """`{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or bare; several apart by `;` or white space."""

    heads = "<{["
    separators = ";"

    def _call(self) -> Steps:
        if self._character == "<":
            if not (yield from self._literal("<|python_tag|>")):
                return False
            yield from self._skip_space()
            return (yield from self._object_or_list(is_marked=True))
        if self._character in "{[":
            return (yield from self._object_or_list(is_marked=False))
        return (yield from self._plain())


class GenericJsonParser(JsonCallParser):
    """An object with a name and arguments, or a list of them; bare, in a code fence, or between `<tool_call>` tags."""

    heads = "<`{["
    separators = ",;"

    def _call(self) -> Steps:
        is_marked = False
        if self._character == "`":
            if not (yield from self._literal("```")):
                return False
            while self._character.isalnum() or self._character == "_":
                self._hold()
                yield
            self._closer = "```"
        elif self._character == "<":
            if not (yield from self._literal("<tool_call>")):
                return False
            self._closer = "</tool_call>"
            is_marked = True
        elif self._character not in "{[":
            return (yield from self._plain())
        yield from self._skip_space()
        return (yield from self._object_or_list(is_marked))


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`.

    Of the newer form also those with an id, `name[CALL_ID]id[ARGS]{...}`, and without a marker, `name{...}`.
    """

    heads = "["

    def __init__(self, tool_names: Collection[str] | None = None, new_call_id: Callable[[], str] = new_mistral_call_id):
        super().__init__(tool_names, new_call_id)

    def _call(self) -> Steps:
        if self._character != "[":
            return (yield from self._plain())
        if not (yield from self._literal("[TOOL_CALLS]")):
            return False
        yield from self._skip_space()
        if self._character and self._character in "[{":
            return (yield from self._object_or_list(is_marked=True))
        return (yield from self._named())

    def _named(self) -> Steps:
        name = yield from self._word()
        if not name:
            return False
        if self._character == "[":
            self._hold()
            yield
            if self._character == "C":
                if not (yield from self._literal("CALL_ID]")) or not (yield from self._word()):
                    return False
                if self._character != "[":
                    return False
                self._hold()
                yield
            if not (yield from self._literal("ARGS]")):
                return False
        yield from self._skip_space()
        if self._character != "{":
            return False
        self._start_call(name)
        yield from self._stream_object()
        self._end_call()
        return True

    def _word(self) -> Steps:
        letters = []
        while self._character.isalnum() or (self._character and self._character in "_-."):
            letters.append(self._character)
            self._hold()
            yield
        yield from self._skip_space()
        return "".join(letters)
