"""Which request fields exist, and what happens to each: one table a kind, read by `protocol`.

Supported fields are the attributes of the request types in `protocol`. Here are the others: fields that change no
answer and are accepted, and fields that other servers know and we do not support yet, which are refused by name
unless their value asks for what happens anyway. Whatever is in no table is unknown, and refused with the nearest name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from octavo.errors import InvalidRequestError

# Labels for the sender's own bookkeeping. They are accepted, change no answer, and do not come back in it.
FIELDS_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

# Field: the values that ask for nothing beyond what we do, and are therefore accepted.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # llama.cpp and others
    "cache_prompt": (True,),
    "dynatemp_range": (0, 0.0),
    "grammar": ("",),
    "json_schema": (),
    "min_keep": (),
    "mirostat": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "typical_p": (1, 1.0),
}

# Fields that ChatRequest has and nobody reads yet: refused like the ones above. Whoever reads one takes it out here.
PENDING_CHAT_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "include_reasoning": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
}


def refuse_pending(fields: dict[str, Any]) -> None:
    """Raises InvalidRequestError."""
    for name, accepted in PENDING_CHAT_FIELDS.items():
        if name in fields and not _is_among(fields[name], accepted):
            _refuse_unsupported(name, accepted)


def keep_supported(fields: dict[str, Any], supported: Iterable[str], path: str = "") -> dict[str, Any]:
    """The supported fields that have a value; null counts as absent.

    path: prefix of the names in messages, such as "stream_options."
    Raises InvalidRequestError for the first field that we do not know or do not support.
    """
    names = frozenset(supported)
    kept = {}
    for name, value in fields.items():
        if name in names:
            if value is not None:
                kept[name] = value
        elif not path and name in FIELDS_WITHOUT_EFFECT:
            continue
        elif not path and name in UNSUPPORTED_FIELDS:
            if value is not None and not _is_among(value, UNSUPPORTED_FIELDS[name]):
                _refuse_unsupported(name, UNSUPPORTED_FIELDS[name])
        else:
            _refuse_unknown(name, names, path)
    return kept


def _is_among(value: Any, accepted: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but not in a request.
    return any(value == candidate and isinstance(value, bool) == isinstance(candidate, bool) for candidate in accepted)


def _refuse_unsupported(name: str, accepted: tuple[Any, ...]) -> None:
    way_out = "leave it out"
    if accepted:
        way_out += f", or send {' or '.join(json.dumps(value) for value in accepted)}"
    raise InvalidRequestError(f"{name} is not supported yet; {way_out}.", param=name, code="unsupported_field")


def _refuse_unknown(name: str, known: frozenset[str], path: str) -> None:
    shown = path + (name if len(name) <= 64 else name[:61] + "...")
    nearest = difflib.get_close_matches(name[:64], sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean {path}{nearest[0]}?" if nearest else f"known here: {', '.join(sorted(known))}."
    raise InvalidRequestError(f"There is no field {shown}; {hint}", param=shown, code="unknown_field")
