"""What the engine layer needs of a model that has been loaded, and how its text side is read from its files.

`octavo.executor.local.LocalExecutor.load` is the loader; tests bring their own, by name across the process boundary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Protocol

from octavo.config import EngineArgs, EngineConfig
from octavo.core.interfaces import Executor
from octavo.errors import ConfigError, InvalidRequestError
from octavo.report import StartReport
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer, load_tokenizer_folder, tokenizer_from_gguf
from octavo.weights.gguf import GGUFFile
from octavo.weights.source import DEFAULT_MODEL, ModelSource, resolve_source

OnProgress = Callable[[str, int, int], None]  # (what is being done, how much is done, of how much; 0 if unknown)

DEFAULT_EXECUTOR = "octavo.executor.local:LocalExecutor.load"


class ModelShape(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class LoadedExecutor(Executor, Protocol):
    """An executor that holds its model, and what was resolved while it was loaded."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_config(self) -> ModelShape: ...

    @property
    def report(self) -> StartReport: ...


ExecutorFactory = Callable[[EngineArgs, ModelSource, OnProgress], LoadedExecutor]


def find_executor_factory(name: str) -> ExecutorFactory:
    """name: "package.module:attribute.attribute". Raises ConfigError."""
    module_name, _, path = name.partition(":")
    try:
        found = importlib.import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"The executor {name!r} cannot be imported: {error}.", option="--executor") from error
    return found  # type: ignore[return-value]


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
