"""The npm client, langchain-openai, litellm and llama-index, each in an installation of its own under build/clients.

`make test-clients` installs them and runs this; without it these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
INSTALLED = Path(os.environ.get("OCTAVO_CLIENTS", HERE.parents[1] / "build" / "clients"))


def run(command: list[str], server: Any, cwd: Path) -> None:
    env = {**os.environ, "OCTAVO_URL": server.url, "OCTAVO_KEY": "secret", "NO_COLOR": "1"}
    # litellm would fetch a list of prices.
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    print(ran.stdout)  # noqa: T201  # shown by -rA
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_npm_client(server: Any) -> None:
    folder = INSTALLED / "node"
    if shutil.which("node") is None:
        pytest.skip("there is no node here; make test-clients needs it")
    if not (folder / "node_modules" / "openai").is_dir():
        pytest.skip("the npm client is not installed; run make test-clients")
    # Where its packages are: a module is looked for beside the file that wants it.
    shutil.copy(HERE / "node" / "openai.test.mjs", folder)
    run(["node", "--test", "--test-reporter=spec", "openai.test.mjs"], server, folder)


@pytest.mark.parametrize("name", ["langchain", "litellm", "llama_index"])
def test_a_framework(server: Any, name: str) -> None:
    python = INSTALLED / "venv" / "bin" / "python"
    if not python.is_file():
        pytest.skip("the frameworks are not installed; run make test-clients")
    run([str(python), str(HERE / "frameworks" / f"use_{name}.py"), f"{server.url}/v1", "secret"], server, HERE)
