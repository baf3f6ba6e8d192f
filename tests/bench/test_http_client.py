"""Raw bytes with times, read after the fact; however the network cut them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.http_client import Exchange, parse_url, read_answer
from octavo.bench.outcome import Outcome, read_outcome
from octavo.bench.workload import PlannedRequest
from octavo.errors import ConfigError

REQUEST = PlannedRequest(prompt="a b c", max_tokens=2)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"b","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


WHOLE = HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"


def exchange_of(*pieces: bytes) -> Exchange:
    return Exchange(sent_at=0.0, pieces=[(float(index + 1), piece) for index, piece in enumerate(pieces)])


def outcome_of(*pieces: bytes, fault: str | None = None) -> Outcome:
    exchange = exchange_of(*pieces)
    exchange.fault = fault
    return read_outcome(REQUEST, exchange)


def test_each_token_has_the_time_of_the_piece_it_came_in() -> None:
    outcome = outcome_of(HEAD, chunk(EVENTS[0]), chunk(EVENTS[1]), chunk(EVENTS[2]) + chunk(EVENTS[3]) + b"0\r\n\r\n")
    assert outcome.failure is None
    assert outcome.token_times == [2.0, 3.0]
    assert (outcome.ttft_s, outcome.gaps_s, outcome.end_to_end_s) == (2.0, [1.0], 4.0)
    assert outcome.time_per_output_token_s == 1.0
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.is_exact) == (3, 2, True)


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=12))
def test_where_the_network_cuts_changes_nothing_but_times(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(WHOLE)]
    pieces = [WHOLE[begin:end] for begin, end in itertools.pairwise(edges)]
    answer = read_answer(exchange_of(*pieces))
    assert answer.is_whole
    assert [data for _, data in answer.events] == [event[6:].strip() for event in EVENTS]
    times = [time for time, _ in answer.events]
    assert times == sorted(times)


@given(st.integers(0, len(WHOLE) - 1))
def test_an_answer_cut_short_anywhere_is_never_taken_for_whole(length: int) -> None:
    answer = read_answer(exchange_of(WHOLE[:length]))
    assert not answer.is_whole


def test_an_answer_without_chunks_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"
    assert outcome_of(head + b"".join(EVENTS)).is_exact


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        ((), "closed without an answer"),
        ((b"SSH-2.0\r\n\r\n",), "closed without an answer"),
        ((HEAD,), "closed early"),
        ((HEAD, b"0\r\n\r\n"), "no events in the answer"),
        ((HEAD, chunk(EVENTS[0])), "closed early"),
        ((HEAD, chunk(b"data: {oops\n\n"), b"0\r\n\r\n"), "an event is not JSON"),
        ((HEAD, chunk(EVENTS[3]), b"0\r\n\r\n"), "no tokens"),
        ((HEAD, chunk(b'data: {"error":{"message":"out of\\n  luck"}}\n\n'), b"0\r\n\r\n"), "error event: out of luck"),
        ((b'HTTP/1.1 503 X\r\nContent-Length: 32\r\n\r\n{"error": {"message": "loading"}}',), "HTTP 503: loading"),
        ((b"HTTP/1.1 502 X\r\n\r\n<html>bad gateway",), "HTTP 502: <html>bad gateway"),
    ],
)
def test_failures_have_names(pieces: tuple[bytes, ...], failure: str) -> None:
    assert outcome_of(*pieces).failure == failure


def test_the_connection_s_fault_is_the_name_when_it_broke() -> None:
    assert outcome_of(fault="connection refused").failure == "connection refused"
    assert outcome_of(HEAD, chunk(EVENTS[0]), fault="timeout after 5 s").failure == "timeout after 5 s"


def test_without_usage_events_are_counted_and_nothing_is_exact() -> None:
    outcome = outcome_of(HEAD, *map(chunk, EVENTS[:2]), chunk(EVENTS[3]), b"0\r\n\r\n")
    assert outcome.failure is None
    assert (outcome.num_output_tokens, outcome.has_usage, outcome.is_exact) == (2, False, False)


def test_a_chat_s_opening_and_closing_events_are_no_tokens() -> None:
    events = [
        b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
        b'{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}',
        b'{"choices":[{"delta":{"reasoning_content":"b"},"finish_reason":null}]}',
        b'{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        b"[DONE]",
    ]
    outcome = outcome_of(HEAD, *(chunk(b"data: " + event + b"\n\n") for event in events), b"0\r\n\r\n")
    assert outcome.token_times == [3.0, 4.0]


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "is_tls"),
    [
        ("http://localhost:8000", "localhost", 8000, "/v1", False),
        ("localhost:8000/", "localhost", 8000, "/v1", False),
        ("https://api.example.com/v1/", "api.example.com", 443, "/v1", True),
        ("http://[::1]:80/proxy", "::1", 80, "/proxy/v1", False),
        ("http://host/v3", "host", 80, "/v3", False),
    ],
)
def test_urls(url: str, host: str, port: int, path: str, is_tls: bool) -> None:
    endpoint = parse_url("--url", url, "secret")
    assert (endpoint.host, endpoint.port, endpoint.base_path, endpoint.is_tls) == (host, port, path, is_tls)
    assert endpoint.headers == (("Authorization", "Bearer secret"),)


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "http://host:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url is"):
        parse_url("--url", url)
