"""https, with certificates made by openssl for this test."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.settings import TlsSettings
from octavo.server.tls import make_tls_context
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """cert and key for 127.0.0.1; other_key of nobody; locked_key with a password."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key, other, locked = (folder / f"{name}.pem" for name in ("cert", "key", "other", "locked"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    name = ("-subj", "/CN=octavo-test", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl("req", "-x509", *curve, "-nodes", "-days", "2", *name, "-keyout", key, "-out", cert)
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", other)
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked)
    return SimpleNamespace(cert=str(cert), key=str(key), other_key=str(other), locked_key=str(locked))


def https_client(client: httpx.AsyncClient, files: SimpleNamespace, with_cert: bool = False) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=files.cert)
    if with_cert:
        context.load_cert_chain(files.cert, files.key)
    url = f"https://127.0.0.1:{client.base_url.port}"
    return httpx.AsyncClient(base_url=url, verify=context, timeout=20, trust_env=False)


async def test_answers_and_streams_come_over_https(serving: Serving, files: SimpleNamespace) -> None:
    tls = TlsSettings(certfile=files.cert, keyfile=files.key)
    async with serving(FakeEngine(), tls=tls) as plain, https_client(plain, files) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            await plain.get("/health")
        assert (await client.get("/health")).status_code == 200


async def test_with_ca_certs_a_client_must_show_one(serving: Serving, files: SimpleNamespace) -> None:
    tls = TlsSettings(certfile=files.cert, keyfile=files.key, ca_certs=files.cert)
    async with serving(FakeEngine(), tls=tls) as plain:
        async with https_client(plain, files, with_cert=True) as client:
            assert (await client.get("/health")).status_code == 200
        async with https_client(plain, files) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/health")


def test_files_that_cannot_be_used_name_their_option(files: SimpleNamespace, tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("not a certificate")
    for settings, option, words in (
        (TlsSettings(certfile="/nothing/here.pem"), "--ssl-certfile", "cannot be read: No such file"),
        (TlsSettings(certfile=files.cert, keyfile="/nothing/here.pem"), "--ssl-keyfile", "No such file"),
        (TlsSettings(certfile=files.cert, keyfile=files.other_key), "--ssl-certfile", "cannot be used together"),
        (TlsSettings(certfile=files.cert), "--ssl-certfile", "cannot be used together"),
        (TlsSettings(certfile=str(text), keyfile=files.key), "--ssl-certfile", "cannot be used together"),
        (TlsSettings(certfile=files.cert, keyfile=files.locked_key), "--ssl-keyfile", "encrypted"),
        (TlsSettings(certfile=files.cert, keyfile=files.key, ca_certs=str(text)), "--ssl-ca-certs", "no certificates"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            make_tls_context(settings)
        assert caught.value.option == option
