from __future__ import annotations

from typing import Any

import pytest

from octavo.bench import probe as probe_module
from octavo.bench.probe import Probe, WatchedOps, measure_watch_cost


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(probe_module, "clock", clock)
    return clock


class Engine:
    def __init__(self, clock: Clock):
        self.clock = clock

    def outer(self, num_inner: int) -> str:
        self.clock.now_ns += 10
        for _ in range(num_inner):
            self.inner()
        self.clock.now_ns += 1
        return "done"

    def inner(self) -> None:
        self.clock.now_ns += 100

    def fail(self) -> None:
        self.clock.now_ns += 5
        raise ValueError("as expected")


def test_a_part_s_time_is_without_the_parts_it_calls(clock: Clock) -> None:
    engine, probe = Engine(clock), Probe()
    probe.watch(engine, "outer", "outer")
    probe.watch(engine, "inner", "inner")
    assert engine.outer(3) == "done"
    assert probe.take() == ({"outer": 11, "inner": 300}, {"outer": 1, "inner": 3})
    assert probe.take() == ({}, {})


def test_a_part_that_raises_is_counted_too(clock: Clock) -> None:
    engine, probe = Engine(clock), Probe()
    probe.watch(engine, "fail", "failing")
    with pytest.raises(ValueError, match="as expected"):
        engine.fail()
    assert probe.take() == ({"failing": 5}, {"failing": 1})


def test_afterwards_everything_is_as_it_was(clock: Clock) -> None:
    engine, probe = Engine(clock), Probe()
    engine.fail = engine.inner  # type: ignore[method-assign]
    own = engine.fail
    probe.watch(engine, "inner", "inner")
    probe.watch(engine, "fail", "failing")
    probe.unwatch()
    assert vars(engine) == {"clock": clock, "fail": own}
    engine.inner()
    assert probe.take() == ({}, {})


def test_watched_ops_are_the_backend_but_for_the_watch(clock: Clock) -> None:
    class Ops:
        name = "fake"

        def add(self, x: int, y: int) -> int:
            clock.now_ns += 7
            return x + y

        def other(self) -> str:
            return "other"

    probe = Probe()
    ops: Any = WatchedOps(Ops(), probe, ("add",), "op ")
    assert (ops.add(1, 2), ops.other(), ops.name) == (3, "other", "fake")
    assert probe.take() == ({"op add": 7}, {"op add": 1})


def test_a_watch_s_cost_is_measured() -> None:
    inside, outside = measure_watch_cost()
    assert inside >= 0
    assert outside >= 0
