"""What the requests' types do not say of their fields, for OpenAPI: bounds, shapes, a sentence, an example.

Keyed by the field's name, in whichever request it is.
"""

from __future__ import annotations

from typing import Any

from octavo.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
)
from octavo.server.request_ids import MAX_REQUEST_ID_CHARS
from octavo.server.sampling_fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CACHE_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
)

_TOKEN_ID = {"type": "integer", "minimum": 0}
_SCHEMA_TYPES = ["object", "boolean", "string"]
_EXAMPLE_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}, "cache_control": {}},
    "required": ["type", "text"],
    "additionalProperties": {"type": "null"},
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": {"type": ["string", "object"]}},
            "required": ["name"],
        },
    },
    "required": ["id", "function"],
}
# As `messages` reads them.
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}, {"type": "null"}],
            "description": "May be absent or null for an assistant.",
        },
        "name": _TEXT_OR_NULL,
        "tool_calls": {"type": ["array", "null"], "items": _CALL, "description": "Of an assistant."},
        "tool_call_id": {**_TEXT_OR_NULL, "description": "Of a tool: the call that it answers."},
        "reasoning_content": _TEXT_OR_NULL,
        "reasoning": _TEXT_OR_NULL,
        "refusal": _TEXT_OR_NULL,
        "annotations": {"type": ["array", "null"], "maxItems": 0},
        "audio": {"type": "null"},
        "function_call": {"type": "null"},
        "cache_control": {},
    },
    "required": ["role"],
    "additionalProperties": {"type": "null"},
}

FIELD_NOTES: dict[str, dict[str, Any]] = {
    "model": {"description": "One of the names of /v1/models; without it, the one that is served."},
    "messages": {"description": "The chat so far.", "minItems": 1, "items": _MESSAGE},
    "prompt": {"description": "A text or, for completions, also a list of texts, token ids, or lists of token ids."},
    # How tokens are chosen
    "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE, "description": "0 is greedy."},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1, "description": "Sample from the likeliest tokens of this mass."},
    "top_k": {"minimum": -1, "description": "Sample from so many; 0 or -1 keeps all tokens."},
    "min_p": {"minimum": 0, "maximum": 1, "description": "Leave out what is less likely than this share of the best."},
    "seed": {"description": "The same seed and request give the same answer, whatever else runs."},
    "presence_penalty": {"minimum": -2, "maximum": 2, "description": "Against tokens that the answer already has."},
    "frequency_penalty": {"minimum": -2, "maximum": 2, "description": "The same, for each time that it has them."},
    "repetition_penalty": {
        "minimum": 1 / MAX_REPETITION_PENALTY,
        "maximum": MAX_REPETITION_PENALTY,
        "description": "1 changes nothing; counts the prompt's tokens too.",
    },
    "logit_bias": {
        "description": "Added to the logits of tokens, by their ids.",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        "maxProperties": MAX_BIASED_TOKENS,
        "examples": [{"50": -100}],
    },
    "allowed_token_ids": {"description": "Nothing but these tokens, so an end token only if it is among them."},
    "bad_words": {"maxItems": MAX_BAD_WORDS, "description": "Texts whose last token is not sampled after the others."},
    # Where it ends
    "max_tokens": {
        "minimum": 0,
        "description": "The older name of max_completion_tokens. 0 only goes with echo or prompt_logprobs.",
    },
    "max_completion_tokens": {"minimum": 0, "description": "Prompt and answer together stay within max_model_len."},
    "min_tokens": {"minimum": 0, "description": "Nothing ends the answer before it has so many tokens."},
    "stop": {"description": f"Up to {MAX_STOPS} texts that end the answer, and are not part of it."},
    "stop_token_ids": {"description": "Tokens that end the answer.", "maxItems": MAX_STOP_TOKEN_IDS},
    "include_stop_str_in_output": {"description": "Keep the stop string, or the stop token's text."},
    "ignore_eos": {"description": "Go on until max_tokens."},
    # How many answers, and which
    "n": {"minimum": 1, "maximum": MAX_N, "description": "Answers to make of each prompt."},
    "best_of": {"minimum": 1, "maximum": MAX_N, "description": "Make so many and answer with the n likeliest."},
    "use_beam_search": {"description": "Search for the n likeliest texts, n beams wide, instead of sampling."},
    "length_penalty": {
        "minimum": -10,
        "maximum": 10,
        "description": "Of beam search: above 0 favours long texts, below 0 short ones.",
    },
    # What is said of them
    "logprobs": {
        "minimum": 0,
        "maximum": MAX_LOGPROBS,
        "description": "Tell how likely each token was, from the raw logits: for completions, beside so many others.",
    },
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS, "description": "The likeliest tokens of each place."},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS, "description": "The same for the prompt's tokens."},
    "echo": {"description": "Begin the answer with the prompt, and its logprobs with the prompt's."},
    "skip_special_tokens": {"description": "Leave control tokens out of the text."},
    "spaces_between_special_tokens": {"description": "Accepted; nothing is ever put between tokens."},
    "return_token_ids": {"description": "Add prompt_token_ids, and token_ids to each choice."},
    "return_tokens_as_token_ids": {"description": 'Name tokens of logprobs as "token_id:5".'},
    "stream": {"description": "Answer as server-sent events."},
    "stream_options": {"description": "Only with stream."},
    # What the text must match
    "response_format": {
        "type": "object",
        "description": 'The answer is JSON. {"type": "json_object"}, or json_schema with a schema, always enforced.',
        "examples": [{"type": "json_schema", "json_schema": {"name": "answer", "schema": _EXAMPLE_SCHEMA}}],
    },
    "structured_outputs": {
        "type": "object",
        "description": "One of json (a schema), json_object, regex, choice, grammar (Lark or GBNF).",
        "examples": [{"choice": ["yes", "no"]}],
    },
    "guided_json": {"type": _SCHEMA_TYPES, "description": "The older name of structured_outputs.json."},
    "guided_json_object": {"type": "boolean", "description": "The older name of structured_outputs.json_object."},
    "guided_regex": {"type": "string", "description": "The older name of structured_outputs.regex."},
    "guided_choice": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
        "description": "The older name of structured_outputs.choice.",
    },
    "guided_grammar": {"type": "string", "description": "The older name of structured_outputs.grammar."},
    "grammar": {"type": "string", "description": "llama.cpp's name of structured_outputs.grammar."},
    "json_schema": {"type": _SCHEMA_TYPES, "description": "llama.cpp's name of structured_outputs.json."},
    # Tools, reasoning, the template
    "tools": {"description": "Functions that the model may call, in OpenAI's form."},
    "tool_choice": {
        "anyOf": [{"type": "string"}, {"type": "object"}],
        "description": '"none", "auto", "required", or one function.',
        "examples": ["auto", {"type": "function", "function": {"name": "get_weather"}}],
    },
    "parallel_tool_calls": {"description": "More than one call in an answer."},
    "reasoning_effort": {"description": "For templates that have it."},
    "include_reasoning": {"description": "Tell the reasoning as well, in reasoning_content."},
    "chat_template": {"description": "A Jinja template to use instead of the model's own."},
    "chat_template_kwargs": {"description": "Variables for the template.", "examples": [{"enable_thinking": False}]},
    "documents": {"description": "Documents for templates that have them."},
    "add_special_tokens": {"description": "Put BOS and the like: by default for a prompt, not for messages."},
    "add_generation_prompt": {"description": "Of messages: end with what opens the assistant's answer."},
    "continue_final_message": {"description": "Go on with the last message, which is the assistant's."},
    # How the request is treated
    "truncate_prompt_tokens": {
        "minimum": -1,
        "not": {"const": 0},
        "description": "Keep the prompt's last tokens only; -1 keeps as many as there is room for.",
    },
    "priority": {"description": "With --scheduling-policy priority: lower goes first."},
    "request_id": {
        "pattern": f"^[A-Za-z0-9._:@/+=-]{{1,{MAX_REQUEST_ID_CHARS}}}$",
        "description": "Part of the answer's id, and in the log, unless X-Request-Id names the request.",
    },
    "cache_salt": {
        "minLength": 1,
        "maxLength": MAX_CACHE_SALT_CHARS,
        "description": "Cached prompts are shared with requests of the same salt only.",
    },
    # /tokenize and /detokenize
    "tokens": {"description": "Token ids.", "items": _TOKEN_ID},
    "return_token_strs": {"description": "Tell each token's text as well."},
}
FIELD_NOTES["allowed_token_ids"] |= {"items": _TOKEN_ID, "minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS}

STREAM_OPTION_NOTES: dict[str, dict[str, Any]] = {
    "include_usage": {"description": "End with a chunk that has the usage, and no choices."},
    "continuous_usage_stats": {"description": "Tell the usage so far in every chunk."},
    "include_obfuscation": {"const": False, "description": "Not supported; only false is accepted."},
}
