"""A real `octavo serve` with the real SmolLM2, in processes of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

START_TIMEOUT_S = 90.0


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: "name{labels}" without the model's label -> value."""
        samples = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[re.sub(r'model_name="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
        return samples

    def engine_pid(self) -> int:
        """The one child of the API process that runs the engine."""
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                if b"octavo.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        raise AssertionError("no engine process; the log says:\n" + self.log.read_text())


def wait_until(condition: Any, timeout_s: float, what: str) -> Any:
    """Ask again until the condition holds; what it returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if answer := condition():
                return answer
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running_server(model: Path, log: Path, *options: str) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", str(port), *options]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "100"}
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:

        def is_healthy() -> bool:
            assert process.poll() is None, "octavo serve left at start; its log:\n" + log.read_text()
            return httpx.get(f"{server.url}/health", timeout=30).status_code == 200

        wait_until(is_healthy, START_TIMEOUT_S, "the server answers /health")
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="package")
def server(smollm2_gguf: Path, tmp_path_factory: Any) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    with running_server(smollm2_gguf, log, "--served-model-name", "smollm2", "--max-num-seqs", "64") as server:
        yield server
