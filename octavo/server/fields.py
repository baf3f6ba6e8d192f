"""Which request fields exist, and what happens to each: one table a kind, read by `protocol`.

Supported fields are the attributes of the request types in `protocol`. Here are the others: labels that change no
answer and are accepted, and fields that other servers know and we do not support, which are refused by name unless
their value asks for what happens anyway. Whatever is in no table is unknown, and refused with the nearest name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from octavo.errors import InvalidRequestError
from octavo.server.decoding import refuse_value

# The sender's own bookkeeping: OpenAI's fields, and what common front ends and proxies (Open WebUI, LibreChat, LiteLLM,
# LangChain, OpenRouter's clients) send along. Accepted, written to the access log, without effect on the answer, and
# not in it. Their type: a text; or, where it says so, any object.
LABEL_FIELDS: dict[str, type] = {
    "metadata": dict,
    "user": str,
    "user_id": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "chat_id": str,
    "session_id": str,
    "conversation_id": str,
    "thread_id": str,
    "message_id": str,
    "trace_id": str,
    "litellm_call_id": str,
    "litellm_session_id": str,
    "litellm_trace_id": str,
}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """accepted: values that ask for nothing beyond what we do. way_out: what to do instead, besides leaving it out."""

    accepted: tuple[Any, ...] = ()
    way_out: str = ""


UNSUPPORTED_FIELDS: dict[str, Unsupported] = {
    # OpenAI
    "audio": Unsupported(),
    "echo": Unsupported((False,), "it is a field of /v1/completions"),  # of chats, where vLLM has it
    "function_call": Unsupported(("none", "auto"), "use tool_choice"),
    "functions": Unsupported(([],), "use tools"),
    "modalities": Unsupported((["text"],), "answers are text"),
    "moderation": Unsupported(),
    "prediction": Unsupported(),
    "prompt_cache_retention": Unsupported(("in_memory", "in-memory"), "cached prompts stay while there is room"),
    "service_tier": Unsupported(("auto", "default"), "there is one tier here, and a request's own priority"),
    "store": Unsupported((False,), "this server keeps no answers"),
    "suffix": Unsupported(("",), "the model goes on from a prompt and fills no gap"),
    "verbosity": Unsupported(("medium",), "say it in the messages"),
    "web_search_options": Unsupported(),
    # vLLM
    "detokenize": Unsupported((True,), "use return_token_ids"),
    "guided_decoding_backend": Unsupported(("auto", "guidance"), "there is one backend"),
    "guided_whitespace_pattern": Unsupported(),
    "kv_transfer_params": Unsupported(),
    "logits_processors": Unsupported(([],), "use logit_bias"),
    "mm_processor_kwargs": Unsupported(({},)),
    "prompt_embeds": Unsupported((), "send token ids"),
    "structural_tag": Unsupported((), "use structured_outputs"),
    "vllm_xargs": Unsupported(({},)),
    # llama.cpp and others
    "cache_prompt": Unsupported((True,), "start the server with --no-enable-prefix-caching, or send a cache_salt"),
    "dynatemp_range": Unsupported((0, 0.0)),
    "max_new_tokens": Unsupported((), "use max_tokens"),
    "min_keep": Unsupported((0,)),
    "mirostat": Unsupported((0,)),
    "n_predict": Unsupported((), "use max_tokens"),
    "n_probs": Unsupported((0,), "use logprobs"),
    "repeat_penalty": Unsupported((1, 1.0), "use repetition_penalty"),
    "typical_p": Unsupported((1, 1.0)),
}

_MAX_SHOWN_NAME_CHARS = 64
_MAX_HEADER_CHARS = 1024


@dataclass(slots=True)
class FieldReading:
    """How fields are read, and what was found on the way.

    is_lenient: what we do not know or support is ignored instead of refused (`serve --lenient`)
    ignored:    their names, with their path
    labels:     the sender's own words for the access log
    """

    is_lenient: bool = False
    ignored: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    def make_ignored_header(self) -> bytes:
        """The names for X-Octavo-Ignored-Fields; what is no plain word is percent-encoded, too many end in "..."."""
        header = ""
        for name in self.ignored:
            separator = ", " if header else ""
            quoted = quote(_shorten(name), safe=".[]")
            if len(header) + len(quoted) > _MAX_HEADER_CHARS:
                return f"{header}{separator}...".encode("ascii")
            header += separator + quoted
        return header.encode("ascii")

    def keep_supported(
        self, fields: Mapping[str, Any], supported: Iterable[str], *, path: str = "", elsewhere: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """The supported fields that have a value; null counts as absent.

        path:      prefix of the names in messages, such as "stream_options."; below the top there are no labels
        elsewhere: fields that belong to another endpoint, and to which
        Raises InvalidRequestError for the first field that we do not know or do not support.
        """
        names = frozenset(supported)
        kept = {}
        for name, value in fields.items():
            if name in names:
                if value is not None:
                    kept[name] = value
            elif not path and name in LABEL_FIELDS:
                self._note_label(name, value)
            elif not path and name in UNSUPPORTED_FIELDS:
                if value is not None and not is_among(value, UNSUPPORTED_FIELDS[name].accepted):
                    self._refuse_or_ignore(name, UNSUPPORTED_FIELDS[name])
            elif self.is_lenient:
                self.ignored.append(path + name)
            elif name in elsewhere:
                if value is not None:
                    _refuse_elsewhere(name, elsewhere[name])
            else:
                _refuse_unknown(name, names, path)
        return kept

    def _note_label(self, name: str, value: Any) -> None:
        if value is None:
            return
        kind = LABEL_FIELDS[name]
        if not isinstance(value, kind):
            if not self.is_lenient:
                refuse_value(
                    name, value, f"it must be {'an object' if kind is dict else 'a string'}", code="invalid_type"
                )
            self.ignored.append(name)
        elif value:
            self.labels[name] = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))

    def _refuse_or_ignore(self, name: str, unsupported: Unsupported) -> None:
        if not self.is_lenient:
            refuse_unsupported(name, unsupported)
        self.ignored.append(name)


def is_among(value: Any, accepted: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but not in a request.
    return any(value == candidate and isinstance(value, bool) == isinstance(candidate, bool) for candidate in accepted)


def refuse_unsupported(name: str, unsupported: Unsupported) -> None:
    """Raises InvalidRequestError."""
    way_out = "leave it out"
    if unsupported.accepted:
        # 1 and 1.0 are one number to those who read this
        shown = dict.fromkeys(json.dumps(value) for value in unsupported.accepted if not _is_whole(value))
        way_out += f", or send {' or '.join(shown)}"
    why = f": {unsupported.way_out}" if unsupported.way_out else ""
    raise InvalidRequestError(f"{name} is not supported{why}; {way_out}.", param=name, code="unsupported_field")


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _refuse_elsewhere(name: str, endpoint: str) -> None:
    raise InvalidRequestError(
        f"{name} is not a field of this endpoint; send it to {endpoint}.", param=name, code="unknown_field"
    )


def _refuse_unknown(name: str, known: frozenset[str], path: str) -> None:
    shown = path + _shorten(name)
    nearest = difflib.get_close_matches(name[:_MAX_SHOWN_NAME_CHARS], sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean {path}{nearest[0]}?" if nearest else f"known here: {', '.join(sorted(known))}."
    raise InvalidRequestError(f"There is no field {shown}; {hint}", param=shown, code="unknown_field")


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_SHOWN_NAME_CHARS else name[: _MAX_SHOWN_NAME_CHARS - 3] + "..."
