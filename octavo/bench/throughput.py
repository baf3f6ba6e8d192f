"""Tokens per second of a model in this process: reading prompts, generating, both; at several batch sizes.

Generating is the difference of two runs, one that ends with the first token and one that goes on: with it, neither
loading nor reading the prompts is part of the figure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from octavo import EngineArgs
from octavo.bench.engine import LoadedModel, OnProgress, check_length
from octavo.bench.environment import ForeignMeter, describe_environment, noise_notes
from octavo.bench.result import BenchResult, Row
from octavo.bench.statistics import median


def measure_throughput(
    args: EngineArgs,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    max_tokens: int,
    num_rounds: int,
    seed: int,
    on_progress: OnProgress,
    **stand_ins: Any,
) -> BenchResult:
    """args: with max_num_seqs of at least the largest batch. Raises ConfigError, ModelLoadError."""
    started_at = time.time()
    model = LoadedModel(args, on_progress, **stand_ins)
    check_length(prompt_tokens, max_tokens, model.llm.limits.max_model_len)
    rng = random.Random(seed)
    model.generate(model.make_prompts(rng, 1, prompt_tokens), 2)
    meter = ForeignMeter()
    rows = []
    for position, batch_size in enumerate(batch_sizes):
        prefill_s, whole_s = [], []
        for round_index in range(num_rounds):
            done = position * num_rounds + round_index
            on_progress(f"{batch_size} sequences", done, len(batch_sizes) * num_rounds)
            prefill_s.append(_time(model, rng, batch_size, prompt_tokens, 1))
            whole_s.append(_time(model, rng, batch_size, prompt_tokens, max_tokens))
        rows.append(make_row(model.name, batch_size, prompt_tokens, max_tokens, prefill_s, whole_s))
    share = meter.share()
    return BenchResult(
        kind="throughput",
        subject=model.name,
        environment=describe_environment(
            isa=model.isa, threads=model.threads, foreign_share=share, started_at=started_at
        ),
        options={
            "batch_sizes": list(batch_sizes),
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "num_rounds": num_rounds,
            "seed": seed,
        },
        rows=tuple(rows),
        notes=(f"Prompts of {prompt_tokens} tokens, {max_tokens} generated of each.", *noise_notes(share)),
    )


def make_row(
    series: str,
    batch_size: int,
    prompt_tokens: int,
    max_tokens: int,
    prefill_s: Sequence[float],
    whole_s: Sequence[float],
) -> Row:
    """prefill_s: of each round, the time to one token of every sequence; whole_s: to max_tokens of each"""
    prefill, whole = median(prefill_s), median(whole_s)
    assert prefill is not None
    assert whole is not None
    decode = whole - prefill
    # Disturbed rounds can make the longer run the quicker one: then there is nothing to tell.
    num_decoded = batch_size * (max_tokens - 1)
    has_decode = decode > 0 and num_decoded > 0
    return Row(
        series=series,
        x=batch_size,
        name=str(batch_size),
        metrics={
            "prefill_tokens_per_s": batch_size * prompt_tokens / prefill,
            "decode_tokens_per_s": num_decoded / decode if has_decode else None,
            "decode_step_ms": decode / (max_tokens - 1) * 1e3 if has_decode else None,
            "output_tokens_per_s": batch_size * max_tokens / whole,
            "total_tokens_per_s": batch_size * (prompt_tokens + max_tokens) / whole,
            "prefill_s": prefill,
            "whole_s": whole,
        },
    )


def _time(model: LoadedModel, rng: random.Random, batch_size: int, prompt_tokens: int, max_tokens: int) -> float:
    prompts = model.make_prompts(rng, batch_size, prompt_tokens)
    start = time.perf_counter()
    model.generate(prompts, max_tokens)
    return time.perf_counter() - start
