"""What the HTTP side is told at start-up; the engine has its own `EngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_REQUEST_BYTES = 16 * 2**20
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """api_keys:           any of them opens every route; none leaves the server open
    max_request_bytes:  of a request's body
    health_timeout_s:   how long /health waits for the engine
    shutdown_timeout_s: how long requests may go on after SIGTERM
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    health_timeout_s: float = 10.0
    shutdown_timeout_s: float = DEFAULT_SHUTDOWN_TIMEOUT_S
    access_log: bool = False
