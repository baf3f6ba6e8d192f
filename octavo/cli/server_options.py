"""The options of `octavo serve` that are about HTTP, and how what was typed becomes `ServerSettings`."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated

import typer

from octavo.cli.model_options import SERVER_PANEL, MaybeFloat, MaybeInt, MaybeStr
from octavo.cli.quantities import parse_quantity
from octavo.errors import ConfigError
from octavo.server.settings import DEFAULT_MAX_REQUEST_BYTES, CorsSettings, TlsSettings

ACCESS_PANEL = "Access"

HostOption = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all. Set a key then.", rich_help_panel=SERVER_PANEL
    ),
]
PortOption = Annotated[int, typer.Option(metavar="N", help="0 lets the system choose.", rich_help_panel=SERVER_PANEL)]
RootPathOption = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="What a proxy puts before our paths, such as /llm; it may take it off again or not. [default: none]",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
MaxRequestBytesOption = Annotated[
    MaybeStr,
    typer.Option(
        help="Largest body of a request. [default: 16MiB]",
        metavar="BYTES",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
MaxQueuedOption = Annotated[
    MaybeInt,
    typer.Option(
        "--max-num-queued-requests",
        help="Generations that may wait for their turn; more are refused with 429. [default: any number]",
        metavar="N",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
RequestTimeoutOption = Annotated[
    MaybeFloat,
    typer.Option(
        help="Seconds after which a request is aborted, its queueing included. [default: none]",
        metavar="SECONDS",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
ShutdownTimeoutOption = Annotated[
    float,
    typer.Option(
        help="Seconds that running requests get to end after SIGTERM or Ctrl-C; a second one aborts them.",
        metavar="SECONDS",
        rich_help_panel=SERVER_PANEL,
    ),
]
AccessLogOption = Annotated[
    bool,
    typer.Option(
        "--access-log/--no-access-log",
        help="One line a request: id, status, tokens, times. [default: off]",
        rich_help_panel=SERVER_PANEL,
    ),
]
MetricsPrefixOption = Annotated[
    str,
    typer.Option(
        metavar="PREFIX",
        help="Before the names at /metrics; vllm makes vLLM's dashboards work.",
        rich_help_panel=SERVER_PANEL,
    ),
]
LenientOption = Annotated[
    bool,
    typer.Option(
        "--lenient/--strict",
        help="Ignore request fields that are unknown or not supported, and name them in X-Octavo-Ignored-Fields, "
        "instead of refusing the request. [default: strict]",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
ApiKeyOption = Annotated[
    list[str],
    typer.Option(
        help="A key that requests must carry; may be repeated. Without it OCTAVO_API_KEY or VLLM_API_KEY, "
        "if one is set. [default: none]",
        metavar="KEY",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
CertfileOption = Annotated[
    MaybeStr,
    typer.Option(
        "--ssl-certfile",
        help="Serve https with this certificate (PEM, the whole chain). [default: http]",
        metavar="FILE",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
KeyfileOption = Annotated[
    MaybeStr,
    typer.Option(
        "--ssl-keyfile",
        help="The certificate's key, if it is not in the same file. [default: in the same file]",
        metavar="FILE",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
CaCertsOption = Annotated[
    MaybeStr,
    typer.Option(
        "--ssl-ca-certs",
        help="Take only clients with a certificate that one of these has signed. [default: any client]",
        metavar="FILE",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
AllowedOriginsOption = Annotated[
    list[str],
    typer.Option(
        help="A web page's origin, such as https://chat.example, that may use the server from a browser; * for any. "
        "May be repeated. [default: none]",
        metavar="ORIGIN",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
AllowedMethodsOption = Annotated[
    list[str],
    typer.Option(
        help="HTTP methods that such pages may use. [default: *]",
        metavar="METHOD",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
AllowedHeadersOption = Annotated[
    list[str],
    typer.Option(
        help="Headers that such pages may send. [default: *]",
        metavar="NAME",
        rich_help_panel=ACCESS_PANEL,
        show_default=False,
    ),
]
AllowCredentialsOption = Annotated[
    bool,
    typer.Option(
        "--allow-credentials/--no-allow-credentials",
        help="Let such pages send cookies along. [default: off]",
        rich_help_panel=ACCESS_PANEL,
    ),
]


def find_keys(typed: list[str]) -> tuple[str, ...]:
    """The typed keys, or else the environment's. Raises ConfigError for an empty one: it would open the door."""
    if typed:
        if not all(key.strip() for key in typed):
            raise ConfigError("--api-key is empty; give a key, or leave the option out.", option="--api-key")
        return tuple(dict.fromkeys(typed))
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        if key := os.environ.get(name, "").strip():
            return (key,)
    return ()


def parse_max_request_bytes(typed: str | None) -> int:
    """Raises ConfigError."""
    num_bytes = parse_quantity("--max-request-bytes", typed)
    if num_bytes == 0:
        raise ConfigError("--max-request-bytes is 0, so no request would fit.", option="--max-request-bytes")
    return DEFAULT_MAX_REQUEST_BYTES if num_bytes is None else num_bytes


def check_seconds(option: str, seconds: float, *, is_zero_allowed: bool) -> float:
    """Raises ConfigError for what is no sensible time, NaN included."""
    if not (0 if is_zero_allowed else 0.001) <= seconds <= 86400:
        lowest = "0" if is_zero_allowed else "0.001"
        raise ConfigError(f"{option} is {seconds:g}, but it must be between {lowest} and 86400 seconds.", option=option)
    return seconds


def check_max_num_queued(typed: int | None) -> int | None:
    """Raises ConfigError."""
    if typed is not None and typed < 0:
        raise ConfigError(
            f"--max-num-queued-requests is {typed}, but it must be 0 (nobody waits) or more.",
            option="--max-num-queued-requests",
        )
    return typed


def clean_root_path(typed: str) -> str:
    """Begins with a slash and does not end with one; "" for none. Raises ConfigError."""
    path = typed.strip().rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ConfigError(
            f"--root-path is {typed!r}, but it must be a path such as /llm, of letters, digits and . _ ~ -.",
            option="--root-path",
        )
    return path


def clean_metrics_prefix(typed: str) -> str:
    """With its colon. Raises ConfigError for what Prometheus would not take."""
    prefix = typed.rstrip(":") + ":"
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:", prefix):
        raise ConfigError(
            f"--metrics-prefix is {typed!r}, but it must be a word of letters, digits and _, such as vllm.",
            option="--metrics-prefix",
        )
    return prefix


def make_tls_settings(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> TlsSettings | None:
    """None without --ssl-certfile. Raises ConfigError, also for files that cannot be used."""
    if certfile is None:
        for option, value in (("--ssl-keyfile", keyfile), ("--ssl-ca-certs", ca_certs)):
            if value is not None:
                raise ConfigError(f"{option} needs --ssl-certfile, the server's own certificate.", option=option)
        return None
    return TlsSettings(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)


def make_cors_settings(
    origins: list[str], methods: list[str], headers: list[str], allow_credentials: bool
) -> CorsSettings:
    """Raises ConfigError."""
    settings = CorsSettings(
        allowed_origins=_parse_list("--allowed-origins", origins),
        allowed_methods=tuple(word.upper() for word in _parse_list("--allowed-methods", methods)) or ("*",),
        allowed_headers=_parse_list("--allowed-headers", headers) or ("*",),
        allow_credentials=allow_credentials,
    )
    for origin in settings.allowed_origins:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", origin):
            raise ConfigError(
                f"--allowed-origins has {origin!r}, but an origin is a scheme and a host, such as "
                "https://chat.example:8080, without a path; or * for any.",
                option="--allowed-origins",
            )
    if not settings.allowed_origins:
        for option, is_typed in (
            ("--allowed-methods", bool(methods)),
            ("--allowed-headers", bool(headers)),
            ("--allow-credentials", allow_credentials),
        ):
            if is_typed:
                raise ConfigError(f"{option} needs --allowed-origins, which says for whom.", option=option)
    if allow_credentials and "*" in settings.allowed_origins:
        raise ConfigError(
            "--allow-credentials with --allowed-origins * would lend every page the user's cookies; name the origins.",
            option="--allow-credentials",
        )
    return settings


def _parse_list(option: str, typed: list[str]) -> tuple[str, ...]:
    """Words, or lists in JSON as vLLM's users write them: '["https://chat.example"]'."""
    words: list[str] = []
    for entry in typed:
        if entry.lstrip().startswith("["):
            try:
                parsed = json.loads(entry)
            except ValueError:
                parsed = None
            if not isinstance(parsed, list) or not all(isinstance(word, str) for word in parsed):
                raise ConfigError(f"{option} is {entry}, which is not a list of texts in JSON.", option=option)
            words += parsed
        else:
            words.append(entry)
    cleaned = [word.strip() for word in words]
    if not all(cleaned):
        raise ConfigError(f"{option} is empty; give a value, or leave the option out.", option=option)
    return tuple(dict.fromkeys(cleaned))
