"""Stopwatches put around the parts of a running engine: each part's time is its own, without the parts it calls.

A watch costs about a fifth of a microsecond a call. That is measured and taken off again: half of it falls into the
part that is watched and half into the part that calls, and a step has hundreds of calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

clock = time.perf_counter_ns

_CALIBRATION_CALLS = 20_000


class Probe:
    """times_ns, calls: by part, since the last `take`"""

    def __init__(self) -> None:
        self.times_ns: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._inner_ns = 0  # time of finished parts inside the one that runs
        self._undo: list[Callable[[], object]] = []

    def watch(self, owner: Any, attribute: str, part: str) -> None:
        """Time each call of owner.attribute, an instance's method, as `part`."""
        original = getattr(owner, attribute)
        if attribute in vars(owner):
            self.on_unwatch(lambda: setattr(owner, attribute, original))
        else:
            self.on_unwatch(lambda: delattr(owner, attribute))
        setattr(owner, attribute, self.timed(original, part))

    def on_unwatch(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        times_ns, calls = self.times_ns, self.calls
        times_ns.setdefault(part, 0)
        calls.setdefault(part, 0)

        def watched(*args: Any, **kwargs: Any) -> Any:
            outer_ns, self._inner_ns = self._inner_ns, 0
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = clock() - start
                times_ns[part] += elapsed - self._inner_ns
                calls[part] += 1
                self._inner_ns = outer_ns + elapsed

        return watched

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """(times_ns, calls) of the parts that ran since the last time; both start again at 0."""
        taken = (
            {part: ns for part, ns in self.times_ns.items() if self.calls[part]},
            {part: count for part, count in self.calls.items() if count},
        )
        for part in self.times_ns:
            self.times_ns[part] = self.calls[part] = 0
        return taken

    def unwatch(self) -> None:
        """Everything as it was."""
        while self._undo:
            self._undo.pop()()


class WatchedOps:
    """A backend whose ops are timed, each under its name; all else is the backend's."""

    def __init__(self, ops: Any, probe: Probe, names: tuple[str, ...], prefix: str = "op "):
        self._ops = ops
        for name in names:
            setattr(self, name, probe.timed(getattr(ops, name), prefix + name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


def measure_watch_cost() -> tuple[float, float]:
    """(inside, outside) in nanoseconds a call: what a watch adds to the watched part, and to the part that calls."""

    def nothing(x: int) -> int:
        return x

    def call_often(function: Callable[[int], int]) -> float:
        start = clock()
        for number in range(_CALIBRATION_CALLS):
            function(number)
        return (clock() - start) / _CALIBRATION_CALLS

    bare = min(call_often(nothing) for _ in range(5))
    probe = Probe()
    watched = probe.timed(nothing, "nothing")
    whole, inside = float("inf"), float("inf")
    for _ in range(5):
        whole = min(whole, call_often(watched))
        inside = min(inside, probe.take()[0]["nothing"] / _CALIBRATION_CALLS)
    # What the caller pays beyond the bare call; the bare call itself is inside the watch.
    return max(inside - bare, 0.0), max(whole - inside, 0.0)
