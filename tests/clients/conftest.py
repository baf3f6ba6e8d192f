"""A real server with the real SmolLM2, as other people's clients meet it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.conftest import Server, running_server

SERVE_OPTIONS = ("--served-model-name", "smollm2", "--max-num-seqs", "64", "--max-model-len", "2048")


@pytest.fixture(scope="package")
def server(smollm2_gguf: Any, tmp_path_factory: Any) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("clients") / "serve.log"
    with running_server(smollm2_gguf, log, *SERVE_OPTIONS, "--api-key", "secret") as server:
        yield server
