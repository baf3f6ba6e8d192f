"""One incarnation of the engine process as its parent sees it: the child, the socket to it, and news of its death.

Each incarnation has a socket of its own, so the messages of a dead one reach nobody. Knows nothing of requests and
restarts. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

import octavo
from octavo import errors
from octavo.engine.messages import EXIT_REPORTED, Command, Event, Failed, Shutdown, decode_event, encode
from octavo.errors import ConfigError, EngineDeadError, OctavoError

logger = logging.getLogger(__name__)

# The report of a failed start was sent before the process ended, so it is on its way; it cannot take long.
_REPORT_TIMEOUT_S = 5.0
_SHUTDOWN_TIMEOUT_S = 5.0
# Unix sockets have paths of at most 107 bytes.
_MAX_SOCKET_PATH_BYTES = 100


class EngineProcess:
    """One incarnation. `on_death` is called once, with the root cause, unless `close` came first."""

    def __init__(
        self,
        executor_name: str,
        on_event: Callable[[Event], None],
        on_death: Callable[[OctavoError], None],
    ):
        self._on_event = on_event
        self._on_death = on_death
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[Failed] = self._loop.create_future()
        self._has_ended = asyncio.Event()
        self._folder = _make_socket_folder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        try:
            address = _bind(self._socket, self._folder)
            self._process = _spawn(address, executor_name)
        except BaseException:
            self._close_socket()
            raise
        threading.Thread(target=self._watch, name="octavo-engine-watch", daemon=True).start()
        self._reader = self._loop.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Never blocks. What is sent to a process that has died is lost; its death is told by on_death."""
        if not self._is_closed:
            self._socket.send(encode(command))

    async def close(self, timeout_s: float = _SHUTDOWN_TIMEOUT_S) -> None:
        """End it, kindly at first. on_death is not called any more."""
        if self._is_closed:
            return
        self.send(Shutdown())
        self._is_closed = True
        try:
            await asyncio.wait_for(self._has_ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._has_ended.wait()
        finally:
            self._release()

    def kill(self) -> None:
        """End it at once, from any state; for a process that must not be heard any more."""
        self._is_closed = True
        self._process.kill()
        self._release()

    async def _read(self) -> None:
        try:
            while True:
                event = decode_event(await self._socket.recv())
                if isinstance(event, Failed):
                    self._failed.set_result(event)
                elif not self._is_closed:
                    self._on_event(event)
        except Exception:
            # A bug of ours. Nobody would hear this process any more, so it is better dead, and its clients answered.
            logger.exception("A message of the engine process could not be handled.")
            self._process.kill()

    def _watch(self) -> None:
        """In a thread of its own: the only way to wait for a process without polling that works everywhere."""
        self._process.wait()
        # The loop may have been closed meanwhile: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        self._has_ended.set()
        if not self._is_closed:
            self._bury_task = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        status = self._process.returncode
        error: OctavoError = EngineDeadError(_describe_exit(status), code="engine_dead")
        if status == EXIT_REPORTED:
            with contextlib.suppress(asyncio.TimeoutError):
                error = _rebuild_error(await asyncio.wait_for(self._failed, _REPORT_TIMEOUT_S))
        if not self._is_closed:
            self._is_closed = True
            self._release()
            self._on_death(error)

    def _release(self) -> None:
        self._reader.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._close_socket()

    def _close_socket(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _make_socket_folder() -> Path:
    """Readable by us alone, so that nobody else can speak to the engine."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(os.fsencode(folder / "engine")) > _MAX_SOCKET_PATH_BYTES and os.name == "posix":
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return folder


def _bind(socket: zmq.asyncio.Socket, folder: Path) -> str:
    address = f"ipc://{folder / 'engine'}" if zmq.has("ipc") else "tcp://127.0.0.1:*"
    socket.bind(address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _spawn(address: str, executor_name: str) -> subprocess.Popen[bytes]:
    """Its standard input is a pipe that we hold: it closes when we end, and that ends the child."""
    command = [sys.executable, "-m", "octavo.engine.process", "--address", address, "--executor", executor_name]
    environment = dict(os.environ)
    home = Path(octavo.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):
        # Run from a checkout: the child's sys.path starts elsewhere than ours.
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{inherited}" if inherited else str(home)
    # Whatever the child or its libraries print must not get into our standard output, which may be an answer.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=environment)


def _rebuild_error(failed: Failed) -> OctavoError:
    kind = getattr(errors, failed.error_type, None)
    if kind is ConfigError:
        return ConfigError(failed.message, option=failed.option)
    if isinstance(kind, type) and issubclass(kind, errors.ModelLoadError):
        return kind(failed.message)
    return EngineDeadError(f"The engine process failed: {failed.message}", code="engine_dead")


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"The engine process ended with status {status}; what it printed on standard error says why."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hints = {
        "SIGKILL": " If nobody did that, the machine ran out of memory: lower --gpu-memory-utilization or "
        "--kv-cache-memory-bytes.",
        "SIGILL": " The processor lacks an instruction that was used: set OCTAVO_ISA=scalar.",
    }
    return f"The engine process was ended by {name}.{hints.get(name, '')}"
