"""A result of each kind, made up."""

from __future__ import annotations

from octavo.bench.result import BenchResult, Environment, Row

ENVIRONMENT = Environment(
    machine="A Processor With A Rather Long Name v9 @ 2.50GHz",
    cores=2,
    cpus=4,
    memory_bytes=8 * 2**30,
    isa="avx2",
    threads=2,
    python="3.11.7",
    version="0.1.0",
    started_at="2026-01-01T00:00:00Z",
    foreign_share=0.01,
)

_LATENCIES = {
    f"{name}_p{percent}_ms": value
    for name, values in {
        "ttft": (1234.5, 12_345.6, 99_999.0),
        "inter_token": (5.25, 10.5, 204.0),
        "tpot": (5.0, 5.2, 11.9),
        "end_to_end": (1993.0, 24_000.0, 240_000.0),
    }.items()
    for percent, value in zip((50, 90, 99), values, strict=True)
}


def serve_row(series: str = "127.0.0.1:8000", x: float = 64, rate: float = 1234.5, **changes: object) -> Row:
    fields: dict[str, object] = {
        "name": f"{x:g} users",
        "metrics": {
            "output_tokens_per_s": rate,
            "total_tokens_per_s": 3 * rate,
            "requests_per_s": 12.25,
            **_LATENCIES,
        },
        "marks": ("exact",),
    }
    return Row(series=series, x=x, **{**fields, **changes})  # type: ignore[arg-type]


RESULTS = {
    "serve": (
        serve_row(x=1, rate=100.0),
        serve_row(failures={"HTTP 503: The engine is starting": 2, "closed early": 1}, marks=()),
    ),
    "throughput": tuple(
        Row(
            series="model",
            x=size,
            name=str(size),
            metrics={
                "prefill_tokens_per_s": 12_345.6,
                "decode_tokens_per_s": 100.0 * size,
                "output_tokens_per_s": 90.0,
                "total_tokens_per_s": 9999.4,
                "decode_step_ms": 123.4,
            },
        )
        for size in (1, 64)
    ),
    "step": tuple(
        Row(
            series=part,
            x=1,
            name=part,
            group="1 sequence",
            metrics={"time_us": 1234.5, "share": share, "calls_per_step": 121, "time_per_call_us": 10.2},
        )
        for part, share in (("op paged_attention", 0.75), ("Python between ops", 0.25))
    ),
    "kernels": tuple(
        Row(
            series=name,
            x=512,
            name=name,
            group="512 rows",
            metrics={
                "time_us": 65_600.0,
                "read_gbs": 123.4,
                "bandwidth_share": 4.14,
                "gops": 1234.5,
                "peak_share": 0.987,
                "limit_share": 0.5,
                "ratio_to_numpy": 123.4,
            },
        )
        for name in ("linear 262144x640 mixed", "attention prefill 4x256 window 512, context 512")
    ),
}


def make_result(kind: str) -> BenchResult:
    return BenchResult(
        kind=kind,
        subject="a-model-with-a-long-name-135M-Instruct.Q4_1",
        environment=ENVIRONMENT,
        options={"batch_sizes": [1, 64], "rate": None},
        rows=RESULTS[kind],
        notes=("A sentence to read beside the numbers, which is longer than a line of eighty columns can hold.",),
    )
