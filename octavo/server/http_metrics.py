"""Requests counted at the door, also those that never reach the engine, under the names that vLLM's server has.

http_requests_total{handler, method, status="2xx"} and http_request_duration_seconds{handler, method}.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from octavo.prometheus_text import render_registry

_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Whatever else is sent counts as one: a client must not be able to make labels.
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class HttpMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "http_requests",
            "HTTP requests by route, method and kind of status; 499 is a client that left before its answer began.",
            ["handler", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's head to the last byte of its answer.",
            ["handler", "method"],
            registry=self._registry,
            buckets=_BUCKETS,
        )

    def push_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """route: in its general form; "" for a path that leads nowhere"""
        handler = route or "none"
        shown_method = method if method in _METHODS else "other"
        self._requests.labels(handler, shown_method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, shown_method).observe(seconds)

    def render(self) -> bytes:
        return render_registry(self._registry)
