"""A registry of prometheus_client as the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render_registry(registry: CollectorRegistry) -> bytes:
    """CONTENT_TYPE goes with it."""
    return generate_latest(_WithoutCreated(registry))  # type: ignore[arg-type]


class _WithoutCreated:
    """The part of a registry that generate_latest asks for, without the _created times, which no dashboard reads.

    prometheus_client can leave them out too, but for the whole process, which may be our user's own.
    """

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
