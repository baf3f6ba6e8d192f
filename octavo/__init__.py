"""Octavo: LLM inference and serving.

The public names are loaded when they are first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineArgs
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.errors import (
        AuthenticationError,
        ClientError,
        ConfigError,
        CorruptFileError,
        EngineDeadError,
        IncompleteWeightsError,
        InvalidRequestError,
        ModelLoadError,
        ModelNotFoundError,
        ModelSourceError,
        OctavoError,
        OverloadedError,
        RequestFailedError,
        RequestTooLargeError,
        ServerError,
        ShapeError,
        UnsupportedModelError,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "AuthenticationError",
    "ClientError",
    "CompletionOutput",
    "ConfigError",
    "CorruptFileError",
    "EngineArgs",
    "EngineDeadError",
    "IncompleteWeightsError",
    "InvalidRequestError",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelSourceError",
    "OctavoError",
    "OverloadedError",
    "RequestFailedError",
    "RequestOutput",
    "RequestTooLargeError",
    "SamplingParams",
    "ServerError",
    "ShapeError",
    "UnsupportedModelError",
    "__version__",
]

_MODULE_OF = {
    "LLM": "octavo.engine.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "EngineArgs": "octavo.config",
    "SamplingParams": "octavo.core.sampling_params",
    "RequestOutput": "octavo.engine.outputs",
    "CompletionOutput": "octavo.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF.get(name, "octavo.errors")), name)


def __dir__() -> list[str]:
    return __all__
