"""Supervision of the engine process: start it, notice its death, start it again, give up when that is no use.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable

from octavo.engine.loaded import DEFAULT_EXECUTOR, OnProgress
from octavo.engine.messages import Command, Event, Ping, Progress, Ready, Reply, ResetPrefixCache, Start, Step
from octavo.engine.process_handle import EngineProcess
from octavo.errors import EngineDeadError, OctavoError

logger = logging.getLogger(__name__)

# An incarnation that lived this long ends a run of failures.
_STABLE_AFTER_S = 60.0
MAX_FAILURES_IN_A_ROW = 5


class EngineState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


class EngineClient:
    """Keeps an engine process running.

    on_step:    each turn of the engine loop
    on_death:   a running engine has died; the callee fails what was waiting for it
    on_restart: it runs again, empty
    on_progress: of the first start
    Only the current incarnation is ever heard.
    """

    def __init__(
        self,
        on_step: Callable[[Step], None],
        on_death: Callable[[EngineDeadError], None],
        on_restart: Callable[[Ready], None],
        on_progress: OnProgress,
        *,
        executor_name: str = DEFAULT_EXECUTOR,
        restart_delay_s: float = 0.5,
    ):
        self._on_step = on_step
        self._on_death = on_death
        self._on_restart = on_restart
        self._on_progress = on_progress
        self._executor_name = executor_name
        self._restart_delay_s = restart_delay_s
        self.state = EngineState.STARTING
        self._is_settled = asyncio.Event()  # neither starting nor restarting
        self.root_cause: str | None = None
        self._start: Start | None = None
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._ready_at = 0.0
        self._num_failures = 0
        self._restarting: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._next_call_id = 0

    @property
    def pid(self) -> int | None:
        """Of the current engine process."""
        return self._process.pid if self._process is not None else None

    async def start(self, start: Start) -> Ready:
        """The first start. Raises what the engine process met: ConfigError, ModelLoadError, EngineDeadError."""
        self._start = start
        try:
            ready = await self._start_process()
        except BaseException as error:
            self.root_cause = str(error)
            self._set_state(EngineState.FAILED)
            raise
        self._set_state(EngineState.RUNNING)
        return ready

    def send(self, command: Command) -> None:
        """Raises EngineDeadError while no engine is running."""
        self.check_running()
        assert self._process is not None
        self._process.send(command)

    def check_running(self) -> None:
        """Raises EngineDeadError with a sentence for the client while no engine is running."""
        if self.state is not EngineState.RUNNING:
            raise EngineDeadError(self._describe_state(), code=f"engine_{self.state.value}")

    async def wait_until_running(self, timeout_s: float) -> None:
        """Wait out a start or a restart. Raises EngineDeadError when it does not come to run."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_settled.wait(), timeout_s)
        self.check_running()

    async def ping(self, timeout_s: float) -> None:
        """A round trip through the engine loop. Raises EngineDeadError."""
        await self._call(Ping, timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        await self._call(ResetPrefixCache, timeout_s)

    async def close(self) -> None:
        self._set_state(EngineState.CLOSED)
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait((self._restarting,))
        process, self._process = self._process, None
        if process is not None:
            await process.close()
        self._fail_calls(EngineDeadError(self._describe_state(), code="engine_closed"))

    # --- one incarnation after the other ----------------------------------------------------------------------

    async def _start_process(self) -> Ready:
        assert self._start is not None
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ready = ready
        process = EngineProcess(self._executor_name, self._hear, self._bury)
        self._process = process
        process.send(self._start)
        try:
            answer = await ready
        except BaseException:
            # Cancelled, or dead already; either way it must not be heard again.
            if self._process is process:
                self._process = None
                process.kill()
            raise
        self._ready_at = asyncio.get_running_loop().time()
        return answer

    def _hear(self, event: Event) -> None:
        if isinstance(event, Step):
            self._on_step(event)
        elif isinstance(event, Reply):
            call = self._calls.pop(event.call_id, None)
            if call is not None and not call.done():
                call.set_result(event.value)
        elif isinstance(event, Progress):
            if self.state is EngineState.STARTING:
                self._on_progress(event.what, event.num_done, event.num_total)
        elif isinstance(event, Ready) and self._ready is not None and not self._ready.done():
            self._ready.set_result(event)

    def _bury(self, cause: OctavoError) -> None:
        self._process = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(cause)
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._ready_at >= _STABLE_AFTER_S:
            self._num_failures = 0
        self._count_failure(cause)
        error = EngineDeadError(self._describe_state(), code="engine_dead")
        self._fail_calls(error)
        self._on_death(error)
        if self.state is EngineState.RESTARTING:
            self._restarting = loop.create_task(self._restart())

    def _count_failure(self, cause: OctavoError) -> None:
        self._num_failures += 1
        self.root_cause = str(cause)
        is_over = self._num_failures > MAX_FAILURES_IN_A_ROW
        self._set_state(EngineState.FAILED if is_over else EngineState.RESTARTING)
        logger.error("%s", self._describe_state())

    async def _restart(self) -> None:
        while self.state is EngineState.RESTARTING:
            # At once after a first death; slower and slower when it dies again and again.
            if self._num_failures > 1:
                await asyncio.sleep(self._restart_delay_s * 2 ** (self._num_failures - 2))
            try:
                ready = await self._start_process()
            except OctavoError as error:
                self._count_failure(error)
                continue
            self._set_state(EngineState.RUNNING)
            logger.warning("The engine process runs again (pid %s).", self.pid)
            self._on_restart(ready)

    async def _call(self, command: type[Ping] | type[ResetPrefixCache], timeout_s: float) -> None:
        call_id = self._next_call_id
        self._next_call_id += 1
        self.send(command(call_id))
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise EngineDeadError(
                f"The engine process has not answered within {timeout_s:g} s: a very long step, or it hangs.",
                code="engine_not_answering",
            ) from None
        finally:
            self._calls.pop(call_id, None)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        if state in (EngineState.STARTING, EngineState.RESTARTING):
            self._is_settled.clear()
        else:
            self._is_settled.set()

    def _fail_calls(self, error: EngineDeadError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)

    def _describe_state(self) -> str:
        if self.state is EngineState.RESTARTING:
            return f"{self.root_cause} It is being started again; try again in a few seconds."
        if self.state is EngineState.FAILED:
            again = f" It died {self._num_failures} times in a row and is not started again; restart the server."
            return f"{self.root_cause}{again if self._num_failures else ''}"
        if self.state is EngineState.CLOSED:
            return "The engine has been shut down."
        return "The engine is still starting; try again in a few seconds."
