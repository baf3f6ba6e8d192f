"""TLS: the certificate and key, checked before the model is loaded. Standard library."""

from __future__ import annotations

import ssl
from pathlib import Path

from octavo.errors import ConfigError
from octavo.server.settings import TlsSettings


def make_tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Raises ConfigError that names the option at fault."""
    for option, path in (
        ("--ssl-certfile", settings.certfile),
        ("--ssl-keyfile", settings.keyfile),
        ("--ssl-ca-certs", settings.ca_certs),
    ):
        if path is not None:
            _check_readable(option, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse_password() -> str:
        # The ssl module would ask at the terminal, and a service has none.
        raise ConfigError("The key is encrypted; give one without a password.", option="--ssl-keyfile")

    try:
        context.load_cert_chain(settings.certfile, settings.keyfile, password=refuse_password)
    except ssl.SSLError as error:
        where = "the file" if settings.keyfile is None else f"the key in {settings.keyfile}"
        raise ConfigError(
            f"The certificate in {settings.certfile} and {where} cannot be used together: {error.reason or error}. "
            "Both must be PEM, and the key must be the certificate's.",
            option="--ssl-certfile",
        ) from None
    if settings.ca_certs is not None:
        try:
            context.load_verify_locations(settings.ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"{settings.ca_certs} holds no certificates in PEM form: {error.reason or error}.",
                option="--ssl-ca-certs",
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(option: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} is {path}, which cannot be read: {error.strerror}.", option=option) from None
