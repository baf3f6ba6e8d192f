"""What the engine layer needs of a model that has been loaded, and how the loader is found by name.

`octavo.executor.local.LocalExecutor.load` is the loader; tests bring their own, by name across the process boundary.
Imports nothing heavy: the engine process starts with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

from octavo.config import EngineArgs, EngineConfig
from octavo.core.interfaces import Executor
from octavo.errors import ConfigError
from octavo.report import StartReport
from octavo.weights.model_source import ModelSource

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
