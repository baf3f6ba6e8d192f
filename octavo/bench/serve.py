"""Load on servers that speak OpenAI's API, ours or others: closed loop, open loop, two servers in turn.

Knows HTTP only. What a run does is `Run`; the cells of the table are runs with a different number of users or rate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from octavo.bench.environment import ForeignMeter, describe_environment, find_listeners, noise_notes
from octavo.bench.http_client import Endpoint, Exchange, clock, fetch_json, send
from octavo.bench.outcome import Outcome, read_outcome
from octavo.bench.result import BenchResult, Row
from octavo.bench.statistics import median, medians_of_rounds, percentiles_ms
from octavo.bench.workload import (
    LONG_PROMPT,
    PlannedRequest,
    Workload,
    default_num_requests,
    plan_arrivals,
    plan_requests,
    plan_warmup,
)
from octavo.errors import ConfigError

OnProgress = Callable[[str, int, int], None]  # (what is being done, requests done, of how many)

_DEFAULT_WARMUP = 4
# The chats stream this many events each, and then this long, before the long prompt comes.
_STREAMING_EVENTS, _SETTLE_S = 3, 0.5
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """is_chat: ask /chat/completions, not /completions. extra_body: fields put into every request; None removes one."""

    endpoint: Endpoint
    model: str
    is_chat: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """concurrencies: users, one cell each; ignored when a rate is given
    rate:         requests a second that come by chance (an open loop), for duration_s
    num_requests: of a cell; None: by the number of users
    num_warmup:   short requests before each run, not counted; None: one a user, at most 4
    """

    workload: Workload
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    rate: float | None = None
    duration_s: float = 30.0
    num_requests: int | None = None
    num_warmup: int | None = None
    num_rounds: int = 1
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class _Cell:
    name: str
    x: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class _Run:
    metrics: dict[str, float | None]
    failures: Counter[str]
    is_exact: bool
    has_usage: bool
    foreign_share: float | None


def find_model(endpoint: Endpoint, option: str = "--url") -> str:
    """The first model that the server offers. Raises ConfigError when it cannot be asked."""
    models = asyncio.run(fetch_json(endpoint, "/models"))
    if isinstance(models, dict) and models.get("data"):
        return str(models["data"][0]["id"])
    raise ConfigError(
        f"No model list at {endpoint.name}{endpoint.base_path}/models: is the server up, and is the key right? "
        "Give --model when it has no such list.",
        option=option,
    )


def measure_serving(servers: Sequence[Server], options: LoadOptions, on_progress: OnProgress) -> BenchResult:
    """Cell after cell; in each, round after round; in each, server after server: A B A B.

    All servers get the same prompts, each round other ones.
    """
    _check(options)
    started_at = time.time()
    rows: list[Row] = []
    notes: list[str] = []
    foreign: list[float] = []
    names = _name_servers(servers)
    for cell in _make_cells(options):
        runs: list[list[_Run]] = [[] for _ in servers]
        for round_index in range(options.num_rounds):
            for server, name, own in zip(servers, names, runs, strict=True):
                what = f"{name} {cell.name}" + (f" round {round_index + 1}" if options.num_rounds > 1 else "")
                own.append(asyncio.run(_run(server, options, cell, round_index, what, on_progress)))
        foreign += [run.foreign_share for own in runs for run in own if run.foreign_share is not None]
        rows += [_make_row(name, cell, own, len(servers) > 1) for name, own in zip(names, runs, strict=True)]
        if len(servers) > 1:
            rows[-len(servers)] = _add_ratio(rows[-len(servers)], runs[0], runs[1])
        if any(not run.has_usage for own in runs for run in own):
            notes.append(f"{cell.name}: some answers have no usage, so their tokens are counted from events.")
    share = max(foreign) if foreign else None
    return BenchResult(
        kind="serve",
        subject=", ".join(f"{name} ({server.model})" for name, server in zip(names, servers, strict=True)),
        environment=describe_environment(foreign_share=share, started_at=started_at),
        options={
            **dataclasses.asdict(options),
            "servers": [f"{server.endpoint.name}{server.endpoint.base_path}" for server in servers],
            "api": ["chat" if server.is_chat else "completions" for server in servers],
            "extra_body": [server.extra_body for server in servers],
        },
        rows=tuple(rows),
        notes=(*notes, *noise_notes(share)),
    )


def summarize(outcomes: Sequence[Outcome], duration_s: float | None = None) -> dict[str, float | None]:
    """The metrics of one run; failed requests count as requests, not as tokens.

    duration_s: of the run; by default from the first send to the last byte
    """
    good = [outcome for outcome in outcomes if outcome.failure is None]
    if duration_s is None:
        duration_s = max(each.ended_at for each in outcomes) - min(each.sent_at for each in outcomes)
    duration_s = max(duration_s, 1e-9)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    num_prompt = sum(outcome.num_prompt_tokens for outcome in good)
    gaps = [gap for outcome in good for gap in outcome.gaps_s]
    times_per_token = [outcome.time_per_output_token_s for outcome in good]
    known_cached = [outcome.num_cached_tokens for outcome in good if outcome.num_cached_tokens is not None]
    return {
        "output_tokens_per_s": num_output / duration_s,
        "total_tokens_per_s": (num_output + num_prompt) / duration_s,
        "requests_per_s": len(good) / duration_s,
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(good),
        "duration_s": duration_s,
        "output_tokens": num_output,
        "prompt_tokens": num_prompt,
        "prompt_tokens_per_request": num_prompt / len(good) if good else None,
        "cached_tokens": sum(known_cached) if known_cached else None,
        **percentiles_ms("ttft", [outcome.ttft_s for outcome in good]),
        **percentiles_ms("inter_token", gaps),
        "inter_token_max_ms": max(gaps) * 1e3 if gaps else None,
        **percentiles_ms("tpot", [each for each in times_per_token if each is not None]),
        **percentiles_ms("end_to_end", [outcome.end_to_end_s for outcome in good]),
        **_summarize_long_prompt(good),
    }


# --- the loops ----------------------------------------------------------------------------------------------------


async def run_closed_loop(
    sender: Callable[[PlannedRequest], Awaitable[None]], requests: Sequence[PlannedRequest], concurrency: int
) -> None:
    """As many users, each with one request at a time."""
    queue = iter(requests)

    async def be_a_user() -> None:
        for request in queue:
            await sender(request)

    await asyncio.gather(*(be_a_user() for _ in range(min(concurrency, len(requests)))))


async def run_open_loop(
    sender: Callable[[PlannedRequest], Awaitable[None]], requests: Sequence[PlannedRequest]
) -> None:
    """Each request at its time, whether the ones before have been answered or not."""
    start = clock()

    async def send_when_due(request: PlannedRequest) -> None:
        await asyncio.sleep(max((request.due_s or 0.0) - (clock() - start), 0.0))
        await sender(request)

    await asyncio.gather(*(send_when_due(request) for request in requests))


async def _run_long_prompt(
    sender: Callable[[PlannedRequest], Awaitable[None]],
    requests: Sequence[PlannedRequest],
    exchanges: Sequence[Exchange],
) -> None:
    """All but the last at once; the last one when they all stream."""
    chats = [asyncio.ensure_future(sender(request)) for request in requests[:-1]]
    while not all(
        chat.done() or sum(data.count(b"data:") for _, data in exchange.pieces) >= _STREAMING_EVENTS
        for chat, exchange in zip(chats, exchanges, strict=False)
    ):
        await asyncio.sleep(0.02)
    await asyncio.sleep(_SETTLE_S)
    await sender(requests[-1])
    await asyncio.gather(*chats)


async def _run(
    server: Server, options: LoadOptions, cell: _Cell, round_index: int, what: str, on_progress: OnProgress
) -> _Run:
    await _warm_up(server, options, cell, what, on_progress)
    requests = _plan(options, cell, round_index)
    exchanges = [Exchange() for _ in requests]
    exchange_of = {id(request): exchange for request, exchange in zip(requests, exchanges, strict=True)}
    num_done = 0

    async def sender(request: PlannedRequest) -> None:
        nonlocal num_done
        await _send(server, request, options.timeout_s, exchange_of[id(request)])
        num_done += 1
        on_progress(what, num_done, len(requests))

    on_progress(what, 0, len(requests))
    meter = ForeignMeter(_local_pids(server.endpoint))
    if options.rate is not None:
        await run_open_loop(sender, requests)
    elif options.workload.scenario == LONG_PROMPT:
        await _run_long_prompt(sender, requests, exchanges)
    else:
        await run_closed_loop(sender, requests, cell.concurrency)
    foreign_share = meter.share()
    outcomes = [read_outcome(request, exchange) for request, exchange in zip(requests, exchanges, strict=True)]
    good = [outcome for outcome in outcomes if outcome.failure is None]
    return _Run(
        metrics=summarize(outcomes),
        failures=Counter(outcome.failure for outcome in outcomes if outcome.failure is not None),
        is_exact=all(outcome.is_exact for outcome in outcomes),
        has_usage=all(outcome.has_usage for outcome in good),
        foreign_share=foreign_share,
    )


async def _warm_up(server: Server, options: LoadOptions, cell: _Cell, what: str, on_progress: OnProgress) -> None:
    num_requests = min(cell.concurrency, _DEFAULT_WARMUP) if options.num_warmup is None else options.num_warmup
    if num_requests:
        on_progress(f"{what}: warm up", 0, 0)
        requests = plan_warmup(f"{time.time()}/{random.random()}", num_requests)
        await run_closed_loop(
            lambda request: _send(server, request, options.timeout_s, Exchange()), requests, cell.concurrency
        )


async def _send(server: Server, request: PlannedRequest, timeout_s: float, exchange: Exchange) -> None:
    path, body = make_body(server, request)
    await send(server.endpoint, path, body, timeout_s, exchange)


def make_body(server: Server, request: PlannedRequest) -> tuple[str, dict[str, Any]]:
    """The path and the JSON of one request."""
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if server.is_chat:
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt
    body.update(server.extra_body)
    return (
        "/chat/completions" if server.is_chat else "/completions",
        {name: value for name, value in body.items() if value is not None},
    )


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        extra = json.loads(text) if text else {}
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(
            f"--extra-body is {text!r}, but it must be a JSON object such as "
            '{"ignore_eos": null, "top_k": 1}; null leaves a field out.',
            option="--extra-body",
        )
    return extra


# --- helpers ------------------------------------------------------------------------------------------------------


def _check(options: LoadOptions) -> None:
    for option, value in (
        ("--rate", options.rate),
        ("--duration", options.duration_s),
        ("--timeout", options.timeout_s),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} is {value:g}, but it must be above 0.", option=option)
    for name, low in (("num_requests", 1), ("num_warmup", 0), ("num_rounds", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            option = f"--{name.removeprefix('num_').replace('requests', 'num-requests')}"
            raise ConfigError(f"{option} is {value}, but it must be at least {low}.", option=option)
    if options.rate is not None and options.workload.scenario == LONG_PROMPT:
        raise ConfigError("The long-prompt scenario has its own order of requests; leave --rate out.", option="--rate")


def _make_cells(options: LoadOptions) -> list[_Cell]:
    if options.rate is not None:
        return [_Cell(f"{options.rate:g} req/s", options.rate, _DEFAULT_WARMUP)]
    if options.workload.scenario == LONG_PROMPT:
        return [_Cell(f"{count} + long", count, count) for count in options.concurrencies]
    return [_Cell("1 user" if count == 1 else f"{count} users", count, count) for count in options.concurrencies]


def _plan(options: LoadOptions, cell: _Cell, round_index: int) -> list[PlannedRequest]:
    if options.rate is not None:
        requests = plan_arrivals(options.workload, options.rate, options.duration_s, round_index)
        if not requests:
            raise ConfigError(
                f"No request comes in {options.duration_s:g} s at {options.rate:g} a second; use a longer --duration.",
                option="--duration",
            )
        return requests
    if options.workload.scenario == LONG_PROMPT:
        return plan_requests(options.workload, cell.concurrency, round_index)
    return plan_requests(options.workload, options.num_requests or default_num_requests(cell.concurrency), round_index)


def _name_servers(servers: Sequence[Server]) -> list[str]:
    names = [server.endpoint.name for server in servers]
    return [f"{letter} {name}" for letter, name in zip("AB", names, strict=False)] if len(names) > 1 else names


def _make_row(name: str, cell: _Cell, runs: Sequence[_Run], is_compared: bool) -> Row:
    failures: Counter[str] = Counter()
    for run in runs:
        failures += run.failures
    rates = [run.metrics["output_tokens_per_s"] or 0.0 for run in runs]
    metrics = medians_of_rounds([run.metrics for run in runs])
    metrics |= {"num_failed": sum(failures.values())}
    if len(runs) > 1:
        metrics |= {"output_tokens_per_s_min": min(rates), "output_tokens_per_s_max": max(rates)}
    foreign = [run.foreign_share for run in runs if run.foreign_share is not None]
    if foreign:
        metrics["foreign_share"] = max(foreign)
    return Row(
        series=name,
        x=cell.x,
        name=f"{cell.name} {name[0]}" if is_compared else cell.name,
        metrics=metrics,
        failures=dict(failures),
        marks=("exact",) if all(run.is_exact for run in runs) else (),
    )


def _add_ratio(row: Row, runs: Sequence[_Run], others: Sequence[_Run]) -> Row:
    """Output tokens per second against the other server's in the same round; the median over the rounds."""
    ratios = []
    for run, other in zip(runs, others, strict=True):
        rate, other_rate = run.metrics["output_tokens_per_s"], other.metrics["output_tokens_per_s"]
        if rate and other_rate:
            ratios.append(rate / other_rate)
    return dataclasses.replace(row, metrics={**row.metrics, "ratio_to_b": median(ratios)})


def _summarize_long_prompt(good: Sequence[Outcome]) -> dict[str, float | None]:
    """What the chats saw between the long prompt's arrival and its first token."""
    long_prompt = next((outcome for outcome in good if outcome.request.is_long_prompt), None)
    if long_prompt is None:
        return {}
    begin, end = long_prompt.sent_at, long_prompt.token_times[0]
    chats = [outcome for outcome in good if not outcome.request.is_long_prompt]
    gaps = [
        after - before
        for chat in chats
        for before, after in pairwise(chat.token_times)
        if after > begin and before < end
    ]
    return {
        "long_ttft_ms": (end - begin) * 1e3,
        "worst_gap_ms": max(gaps) * 1e3 if gaps else None,
        "chats_alive": sum(chat.token_times[-1] > begin for chat in chats),
    }


def _local_pids(endpoint: Endpoint) -> list[int]:
    """The server's own processes, when it runs here: what they use is no disturbance."""
    return find_listeners(endpoint.port) if endpoint.host in _LOCAL_HOSTS and os.path.isdir("/proc/net") else []
