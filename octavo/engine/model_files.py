"""What the API process and `LLM` read of a model themselves: where it is, its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.config import EngineArgs
from octavo.engine.loaded import OnProgress
from octavo.errors import InvalidRequestError
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer, load_tokenizer_folder, tokenizer_from_gguf
from octavo.weights.gguf import GGUFFile
from octavo.weights.source import DEFAULT_MODEL, ModelSource, resolve_source


def fetch_source(args: EngineArgs, on_progress: OnProgress) -> ModelSource:
    """Find the model, fetching it when needed. Raises ModelSourceError."""
    return resolve_source(args.model or DEFAULT_MODEL, revision=args.revision, on_progress=on_progress)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Raises ModelLoadError."""
    if source.kind == "gguf":
        return tokenizer_from_gguf(GGUFFile(source.path).metadata)
    return load_tokenizer_folder(source.path)


def find_chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """None when the model has none. Raises UnsupportedModelError for one that cannot be read."""
    try:
        return ChatTemplate.from_tokenizer(tokenizer)
    except InvalidRequestError:
        return None


def collect_eos_token_ids(tokenizer: Tokenizer, model_eos_token_ids: Iterable[int]) -> tuple[int, ...]:
    """The tokenizer's and the model's: each may name an end token that the other's file forgets."""
    return tuple(dict.fromkeys((*tokenizer.eos_token_ids, *model_eos_token_ids)))
