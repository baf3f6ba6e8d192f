"""The ways out that a memory error names work when they are typed, and ask for no more than is needed."""

from __future__ import annotations

import re

import pytest

from octavo.memory_fit import _round_share_up
from octavo.report import format_bytes
from tests.test_config import (
    GIB,
    LAPTOP,
    LLAMA_8B,
    LLAMA_8B_BYTES,
    MIB,
    SERVER,
    SMOLLM2,
    SMOLLM2_BYTES,
    refusal,
    resolve,
)


def named_share(message: str) -> float:
    match = re.search(r"--gpu-memory-utilization (\d+\.?\d*)", message)
    assert match, message
    return float(match[1])


@pytest.mark.parametrize("machine", [LAPTOP, SERVER])
@pytest.mark.parametrize(
    ("facts", "weights", "args"),
    [
        (SMOLLM2, SMOLLM2_BYTES, {"gpu_memory_utilization": 0.0001}),
        (LLAMA_8B, LLAMA_8B_BYTES, {"gpu_memory_utilization": 0.01}),
        (SMOLLM2, SMOLLM2_BYTES, {"gpu_memory_utilization": 0.001, "max_num_batched_tokens": 2048}),
    ],
)
def test_the_share_that_a_full_memory_asks_for(facts, weights, machine, args) -> None:  # type: ignore[no-untyped-def]
    message = refusal(facts, machine, weights, **args).message
    share = named_share(message)
    others = {name: value for name, value in args.items() if name != "gpu_memory_utilization"}
    assert resolve(facts, machine, weights, gpu_memory_utilization=share, **others).core.max_model_len >= 16
    refusal(facts, machine, weights, gpu_memory_utilization=round(share - 0.0001, 4), **others)
    budget = int(args["gpu_memory_utilization"] * machine.total_bytes)
    assert f"fill the {format_bytes(budget)} that we may use" in message
    assert f"the weights ({format_bytes(weights)})" in message
    sensible = re.search(r"; (\S+) is enough for one sequence of ([\d,]+) tokens\.", message)
    if sensible is None:  # not all of this machine would do for the model's whole window
        assert (facts, machine) == (LLAMA_8B, LAPTOP)
        return
    core = resolve(facts, machine, weights, gpu_memory_utilization=float(sensible[1]), **others).core
    assert f"{core.max_model_len:,}" == sensible[2]


@pytest.mark.parametrize("max_model_len", [4096, 8192])
def test_the_share_and_the_length_that_a_long_sequence_asks_for(max_model_len: int) -> None:
    message = refusal(gpu_memory_utilization=0.02, max_model_len=max_model_len).message
    share = named_share(message)
    assert resolve(gpu_memory_utilization=share, max_model_len=max_model_len)
    refusal(gpu_memory_utilization=round(share - 0.0001, 4), max_model_len=max_model_len)
    match = re.search(r"use at most (\d+)", message)
    assert match
    assert resolve(gpu_memory_utilization=0.02, max_model_len=int(match[1]))
    refusal(gpu_memory_utilization=0.02, max_model_len=int(match[1]) + 16)


def test_the_bytes_that_a_small_cache_asks_for() -> None:
    message = refusal(kv_cache_memory_bytes=100).message
    least = int(message.split("give at least ")[1].rstrip("."))
    assert resolve(kv_cache_memory_bytes=least)
    refusal(kv_cache_memory_bytes=least - 1)


@pytest.mark.parametrize("total", [1, 3, 10_000, 16 * GIB, 24_123_456_789, 256 * GIB])
@pytest.mark.parametrize("part", [1, 7, 104 * MIB, 5 * GIB + 1])
def test_a_rounded_share_is_enough_and_not_a_ten_thousandth_too_much(part: int, total: int) -> None:
    if part > total:
        return
    share = _round_share_up(part, total)
    assert int(total * share) >= part
    assert share - part / total <= 0.0001 + 1 / total
    assert float(f"{share:g}") == share
