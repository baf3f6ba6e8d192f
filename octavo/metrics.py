"""Step statistics and request events become Prometheus metrics, under the names that vLLM's dashboards know.

A request that was accepted is counted once more when it ends, however it ends: the sum of request_success_total over
the reasons is the number of sequences that ended, and the count of e2e_request_latency_seconds that of requests.

One `Metrics` an engine, with a registry of its own; every metric carries the label model_name. Label children are
bound once, so a step costs a few additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from octavo.core.interfaces import FinishReason, StepStats
from octavo.core.sampling_params import SamplingParams
from octavo.prometheus_text import CONTENT_TYPE, render_registry

__all__ = ["CONTENT_TYPE", "Metrics", "RequestTimes"]

# Seconds. From a cached prompt on a small model to a long prompt in a long queue.
_TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_REQUEST_TIME_BUCKETS = (
    0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0,
)  # fmt: skip


_STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N_BUCKETS = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Of a request that has ended; in seconds, on one clock. None for what it did not reach.

    scheduled_at: when its prompt was first computed
    """

    arrived_at: float
    scheduled_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float


class Metrics:
    """prefix: before every name, "octavo:" unless a dashboard wants another."""

    def __init__(self, model_name: str, max_model_len: int, prefix: str = "octavo:"):
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._prefix = prefix
        self._running = self._gauge("num_requests_running", "Sequences that are being computed.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait for their turn.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache blocks in use; 1 is all of them.")
        blocks = Gauge(
            prefix + "num_blocks",
            "KV cache blocks by state: free, cached (unused, but holding a known prefix), used.",
            ["model_name", "state"],
            registry=self.registry,
        )
        self._free_blocks = blocks.labels(model_name, "free")
        self._cached_blocks = blocks.labels(model_name, "cached")
        self._used_blocks = blocks.labels(model_name, "used")
        self._unowned = self._gauge("num_unowned_blocks", "Blocks that are in no state: 0, or we have a bug.")

        self._preemptions = self._counter("num_preemptions", "Sequences that had to give their blocks back.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._restarts = self._counter("engine_restarts", "Times the engine process was started again after a death.")
        finished = Counter(
            prefix + "request_success",
            "Sequences that ended, by how: stop, length, abort, error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {reason.value: finished.labels(model_name, reason.value) for reason in FinishReason}

        self._first_token_time = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self._inter_token_time = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _INTER_TOKEN_BUCKETS
        )
        self._request_time = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_TIME_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds",
            "From a request's arrival until its prompt is computed.",
            _REQUEST_TIME_BUCKETS,
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "From there to its first token.", _REQUEST_TIME_BUCKETS
        )
        self._decode_time = self._histogram(
            "request_decode_time_seconds", "From its first token to its last.", _REQUEST_TIME_BUCKETS
        )
        self._inference_time = self._histogram(
            "request_inference_time_seconds", "Prefill and decode together.", _REQUEST_TIME_BUCKETS
        )
        # vLLM renamed the per-token one: older dashboards ask for it under the first name, newer ones under the second.
        self._output_token_times = [
            self._histogram(name, "Mean time of a request's tokens after the first.", _INTER_TOKEN_BUCKETS)
            for name in ("time_per_output_token_seconds", "request_time_per_output_token_seconds")
        ]
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS_BUCKETS
        )
        self._request_n = self._histogram("request_params_n", "Generations asked for a prompt.", _N_BUCKETS)
        lengths = _length_buckets(max_model_len)
        self._request_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", lengths)
        self._request_longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest generation.", lengths
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request, all its sequences together.", lengths
        )

    def push_step(self, stats: StepStats) -> None:
        """A turn of the engine loop."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        num_blocks = stats.num_blocks
        self._usage.set(stats.num_used_blocks / num_blocks if num_blocks else 0.0)
        self._free_blocks.set(stats.num_free_blocks)
        self._cached_blocks.set(stats.num_cached_blocks)
        self._used_blocks.set(stats.num_used_blocks)
        self._unowned.set(num_blocks - stats.num_free_blocks - stats.num_cached_blocks - stats.num_used_blocks)
        if stats.num_scheduled_tokens:
            self._step_tokens.observe(stats.num_scheduled_tokens)
        if stats.num_preemptions:
            self._preemptions.inc(stats.num_preemptions)
        if stats.num_prefix_query_tokens:
            self._queries.inc(stats.num_prefix_query_tokens)
            self._hits.inc(stats.num_prefix_hit_tokens)

    def push_first_token(self, num_prompt_tokens: int, seconds: float) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._first_token_time.observe(seconds)

    def push_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def push_token_gap(self, seconds: float) -> None:
        self._inter_token_time.observe(seconds)

    def push_finished_sequence(self, finish_reason: str) -> None:
        self._finished[finish_reason].inc()

    def push_finished_request(
        self, num_prompt_tokens: int, num_tokens: Sequence[int], params: SamplingParams, times: RequestTimes
    ) -> None:
        """num_tokens: generated for each of its sequences"""
        num_generated_tokens = sum(num_tokens)
        self._request_time.observe(times.ended_at - times.arrived_at)
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_generated_tokens)
        self._request_longest.observe(max(num_tokens))
        self._request_n.observe(params.n)
        if params.max_tokens is not None:
            self._request_max_tokens.observe(params.max_tokens)
        if times.scheduled_at is None:
            return
        self._queue_time.observe(max(times.scheduled_at - times.arrived_at, 0.0))
        if times.first_token_at is None or times.last_token_at is None:
            return
        decode_s = times.last_token_at - times.first_token_at
        self._prefill_time.observe(times.first_token_at - times.scheduled_at)
        self._decode_time.observe(decode_s)
        self._inference_time.observe(times.last_token_at - times.scheduled_at)
        longest = max(num_tokens)
        if longest > 1:
            for histogram in self._output_token_times:
                histogram.observe(decode_s / (longest - 1))

    def push_cache_config(self, settings: Mapping[str, str]) -> None:
        """What the cache is like, as the labels of one sample that is 1."""
        info = Gauge(self._prefix + "cache_config_info", "The KV cache.", list(settings), registry=self.registry)
        info.labels(**settings).set(1)

    def push_restart(self) -> None:
        self._restarts.inc()

    def render(self) -> bytes:
        """Prometheus text, for /metrics; CONTENT_TYPE goes with it."""
        return render_registry(self.registry)

    def read(self, name: str, **labels: str) -> float:
        """One sample by its full name without the prefix ("num_requests_running"); for tests and tools."""
        value = self.registry.get_sample_value(self._prefix + name, {"model_name": self._model_name, **labels})
        if value is None:
            raise KeyError(f"There is no metric {self._prefix}{name} with the labels {labels}.")
        return value

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(self._prefix + name, text, ["model_name"], registry=self.registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(self._prefix + name, text, ["model_name"], registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(self._prefix + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)


def _length_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to the window."""
    buckets: list[float] = []
    decade = 1
    while decade <= max_model_len:
        buckets += [decade * step for step in (1, 2, 5) if decade * step <= max_model_len]
        decade *= 10
    return tuple(buckets)
