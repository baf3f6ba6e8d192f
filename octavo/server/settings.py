"""What the HTTP side is told at start-up; the engine has its own `EngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_MAX_REQUEST_BYTES = 16 * 2**20
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsSettings:
    """Which pages of other origins may use the server; without origins, none. "*" is any, of all three."""

    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Paths of PEM files. ca_certs: clients must show a certificate that one of these has signed."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """api_keys:           any of them opens every route; none leaves the server open
    max_request_bytes:  of a request's body
    body_timeout_s:     how long a body may take, and a second more for every 16 KiB that came
    request_timeout_s:  how long a generation may take, its queueing included; None for any time
    max_num_queued_requests: generations that may wait for their turn; None for any number
    root_path:          what a proxy puts before our paths, such as "/llm"; "" for nothing
    health_timeout_s:   how long /health waits for the engine
    shutdown_timeout_s: how long requests may go on after SIGTERM
    metrics_prefix:     before the names of the engine's metrics
    chat_template:      jinja source in place of the model's own
    trust_request_chat_template: let requests bring their own
    tool_call_parser:   how the model writes calls; None finds it in the template
    reasoning_parser:   which markers enclose its reasoning; None finds them in the template, "none" turns it off
    is_lenient:         ignore request fields that we do not know or support, and tell which, instead of refusing them
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    max_num_queued_requests: int | None = None
    root_path: str = ""
    cors: CorsSettings = field(default_factory=CorsSettings)
    tls: TlsSettings | None = None
    health_timeout_s: float = 10.0
    shutdown_timeout_s: float = DEFAULT_SHUTDOWN_TIMEOUT_S
    access_log: bool = False
    metrics_prefix: str = "octavo:"
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    is_lenient: bool = False
