from __future__ import annotations

from typing import Any

import pytest
import typer

from octavo.cli import serve as serve_module
from octavo.cli.arguments import prepare_arguments
from octavo.cli.main import app
from octavo.config import EngineArgs
from octavo.server.settings import ServerSettings

COMMAND = typer.main.get_command(app)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """parse("MODEL", "--flag", ...) -> (EngineArgs, ServerSettings), as `octavo serve` would start with."""
    started: list[tuple[EngineArgs, ServerSettings]] = []

    def run_server(engine_args: EngineArgs, settings: ServerSettings) -> int:
        started.append((engine_args, settings))
        return 0

    monkeypatch.setattr(serve_module, "run_server", run_server)
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def parse(*arguments: str) -> tuple[EngineArgs, ServerSettings]:
        COMMAND(prepare_arguments(COMMAND, ["serve", *arguments]), standalone_mode=False)
        return started.pop()

    return parse
