"""The port, taken before the model is loaded: a port in use is told at once, not after the wait. Standard library."""

from __future__ import annotations

import errno
import ipaddress
import socket

from octavo.errors import ConfigError


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the model is ready, clients are refused rather than kept waiting.

    port: 0 lets the system choose. Raises ConfigError.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}, but it must be between 0 and 65535.", option="--port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host is {host!r}, which is no address of this machine: {error}.", option="--host"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # An explicit IPv6 address is that address only; "::" takes IPv4 clients as well.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def format_url(listener: socket.socket, host: str, scheme: str = "http") -> str:
    """Where a client on this machine finds us."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"{scheme}://{shown}:{port}"


def _explain(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} on {host} is in use by another program; stop that one, or choose a port with --port "
            f"{port + 1 if port < 65535 else 8000}.",
            option="--port",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"Port {port} on {host} needs rights that this user does not have; choose one above 1023 with --port.",
            option="--port",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"--host is {host!r}, which is no address of this machine; use 127.0.0.1, or 0.0.0.0 for all of them.",
            option="--host",
        )
    return ConfigError(f"Cannot listen on {host} port {port}: {error.strerror}.", option="--port")
