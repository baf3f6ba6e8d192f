"""What is typed about HTTP becomes settings, or a sentence that names the option."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.config import EngineArgs
from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings

Parse = Callable[..., tuple[EngineArgs, ServerSettings]]


def settings_of(parse: Parse, *arguments: str) -> ServerSettings:
    return parse("m", *arguments)[1]


def test_what_is_not_typed_is_closed_and_unlimited(parse: Parse) -> None:
    settings = settings_of(parse)
    assert settings.cors.allowed_origins == ()
    assert settings.tls is None
    assert (settings.root_path, settings.metrics_prefix) == ("", "octavo:")
    assert settings.request_timeout_s is None
    assert settings.max_num_queued_requests is None
    assert not settings.access_log


def test_the_limits(parse: Parse) -> None:
    settings = settings_of(
        parse, "--max-num-queued-requests", "0", "--request-timeout", "2.5", "--root-path", "/a/b/", "--access-log"
    )
    assert (settings.max_num_queued_requests, settings.request_timeout_s) == (0, 2.5)
    assert settings.root_path == "/a/b"
    assert settings.access_log


@pytest.mark.parametrize(("typed", "prefix"), [("vllm", "vllm:"), ("vllm:", "vllm:"), ("my_llm", "my_llm:")])
def test_the_metrics_prefix_gets_its_colon(parse: Parse, typed: str, prefix: str) -> None:
    assert settings_of(parse, "--metrics-prefix", typed).metrics_prefix == prefix


@pytest.mark.parametrize(
    "origins",
    [
        ["--allowed-origins", "https://a.example", "http://b:8080"],
        ["--allowed-origins", "https://a.example", "--allowed-origins", "http://b:8080"],
        ["--allowed-origins", '["https://a.example", "http://b:8080"]'],
    ],
)
def test_origins_are_words_or_a_list_as_vllms_users_write_it(parse: Parse, origins: list[str]) -> None:
    cors = settings_of(parse, *origins, "--allowed-methods", "get", "--allow-credentials").cors
    assert cors.allowed_origins == ("https://a.example", "http://b:8080")
    assert cors.allowed_methods == ("GET",)
    assert cors.allowed_headers == ("*",)
    assert cors.allow_credentials


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--allowed-origins", "a.example"], "--allowed-origins"),
        (["--allowed-origins", "https://a.example/page"], "--allowed-origins"),
        (["--allowed-origins", '["https://a.example"'], "--allowed-origins"),
        (["--allowed-origins", " "], "--allowed-origins"),
        (["--allowed-methods", "GET"], "--allowed-methods"),
        (["--allowed-headers", "x"], "--allowed-headers"),
        (["--allow-credentials"], "--allow-credentials"),
        (["--allow-credentials", "--allowed-origins", "*"], "--allow-credentials"),
        (["--ssl-keyfile", "x"], "--ssl-keyfile"),
        (["--ssl-ca-certs", "x"], "--ssl-ca-certs"),
        (["--root-path", "llm"], "--root-path"),
        (["--root-path", "/a b"], "--root-path"),
        (["--metrics-prefix", "a-b"], "--metrics-prefix"),
        (["--metrics-prefix", ""], "--metrics-prefix"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--request-timeout", "nan"], "--request-timeout"),
        (["--max-num-queued-requests", "-1"], "--max-num-queued-requests"),
    ],
)
def test_what_makes_no_sense_is_refused_and_named(parse: Parse, arguments: list[str], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(parse, *arguments)
    assert caught.value.option == option
    assert option in caught.value.message


def test_the_files_of_tls_are_settings(parse: Parse) -> None:
    tls = settings_of(parse, "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem", "--ssl-ca-certs", "a.pem").tls
    assert tls is not None
    assert (tls.certfile, tls.keyfile, tls.ca_certs) == ("c.pem", "k.pem", "a.pem")
