"""schemathesis over our own OpenAPI: no 5xx, and no answer that the document does not describe.

`make fuzz-api` installs it under build/fuzz and runs this; without it these tests are skipped. OCTAVO_FUZZ_EXAMPLES is
how many cases an operation gets: beside them stand those that cover every keyword: well over 2,000 in all.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.server.http import HttpServer
from octavo.server.listener import bind_listener
from octavo.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine, FakeInfo, say
from tests.system.conftest import running_server

SCHEMATHESIS = (
    Path(os.environ.get("OCTAVO_FUZZ", Path(__file__).parents[2] / "build" / "fuzz")) / "bin" / "schemathesis"
)
NUM_EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "100"))
MIN_CASES = 2000
# Not positive_data_acceptance: a schema cannot say that min_tokens is at most max_tokens, or how long a prompt may be.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not SCHEMATHESIS.is_file(), reason="schemathesis is not installed; run make fuzz-api"),
]


def fuzz(url: str, folder: Path, num_examples: int) -> int:
    """The number of cases that were tried; fails with what schemathesis says."""
    command = [
        str(SCHEMATHESIS),
        "run",
        f"{url}/openapi.json",
        f"--checks={','.join(CHECKS)}",
        f"--max-examples={num_examples}",
        "--phases=examples,coverage,fuzzing",
        "--header=Authorization: Bearer secret",
        "--seed=1",
        "--continue-on-failure",
        "--request-timeout=300",
        "--suppress-health-check=all",
    ]
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    print(ran.stdout)  # noqa: T201  # shown by -rA
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"(\d[\d,]*) generated", ran.stdout)
    assert found, ran.stdout
    return int(found[1].replace(",", ""))


@contextmanager
def serving_fake() -> Iterator[str]:
    """The server with an engine that says the same to everybody, in a thread with an event loop of its own."""
    listener = bind_listener("127.0.0.1", 0)
    is_started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        engine = FakeEngine(say("Hel", "lo"), info=FakeInfo(max_model_len=4096))
        server = HttpServer(engine, ServerSettings(api_keys=("secret",)), listener, "9.9.9")
        await server.start()
        is_started.set()
        await stop.wait()
        await engine.shutdown()
        await server.finish()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_started.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def test_a_server_with_a_fake_engine(tmp_path: Path) -> None:
    with serving_fake() as url:
        assert fuzz(url, tmp_path, NUM_EXAMPLES) >= MIN_CASES


def test_a_server_with_the_real_model(smollm2_gguf: Any, tmp_path: Path) -> None:
    # A small window, since a chat without max_tokens goes on to its end.
    options = ("--served-model-name", "smollm2", "--max-model-len", "64", "--api-key", "secret")
    with running_server(smollm2_gguf, tmp_path / "serve.log", *options) as server:
        assert fuzz(server.url, tmp_path, NUM_EXAMPLES) >= MIN_CASES
        assert "Traceback" not in server.log.read_text()
