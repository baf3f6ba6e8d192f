"""Attention and MLP sublayers in one call: bit for bit what the single ops give, whatever the batch and the threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ShapeError
from octavo.ops.cpu import runnable_isas
from octavo.ops.interface import AttentionBatch, AttentionSublayer, MLPSublayer
from octavo.ops.sublayers import run_attention_sublayer, run_mlp_sublayer
from tests.ops.conftest import get_cpu
from tests.ops.op_inputs import attention_batch, misaligned, normal, weight_part

EPS = 1e-5
MAX_POSITIONS = 256


def rotary_table(rotary_dim: int) -> np.ndarray:
    angles = np.arange(MAX_POSITIONS)[:, None] * 1000.0 ** (-np.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def positions_of(batch: AttentionBatch) -> np.ndarray:
    return np.concatenate(
        [
            np.arange(context - (end - start), context)
            for start, end, context in zip(
                batch.query_start[:-1], batch.query_start[1:], batch.context_lens, strict=True
            )
        ]
    ).astype(np.int32)


def make_attention(
    ops: Any,
    seed: int,
    *,
    hidden: int = 96,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    kinds: tuple[str, ...] = ("q4", "q4", "q8"),
    output_kind: str = "q8",
    has_bias: bool = False,
    has_head_norms: bool = False,
    has_output_norm: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionSublayer:
    """kinds: of the weights of queries, keys and values. The same numbers for every backend."""
    rng = np.random.default_rng(seed)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    qkv = [weight_part(rng, kind, size, hidden) for kind, size in zip(kinds, sizes, strict=True)]
    output = weight_part(rng, output_kind, hidden, num_heads * head_dim)
    return AttentionSublayer(
        norm=normal(rng, hidden) * np.float32(0.1),  # scores of a few units: a softmax of larger ones jumps
        eps=EPS,
        qkv=ops.pack_weight(qkv),
        qkv_bias=normal(rng, sum(sizes)) if has_bias else None,
        query_norm=normal(rng, head_dim) if has_head_norms else None,
        key_norm=normal(rng, head_dim) if has_head_norms else None,
        rotary=rotary_table(head_dim),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_window=window,
        soft_cap=soft_cap,
        output=ops.pack_weight([output]),
        output_bias=normal(rng, hidden) if has_bias else None,
        output_norm=normal(rng, hidden) if has_output_norm else None,
    )


def make_mlp(
    ops: Any,
    seed: int,
    *,
    hidden: int = 96,
    inner: int = 160,
    kinds: tuple[str, str] = ("q4", "q4"),
    down_kind: str = "q8",
    is_gelu: bool = False,
    has_bias: bool = False,
    has_output_norm: bool = False,
) -> MLPSublayer:
    rng = np.random.default_rng(seed)
    return MLPSublayer(
        norm=normal(rng, hidden),
        eps=EPS,
        gate_up=ops.pack_weight([weight_part(rng, kind, inner, hidden) for kind in kinds]),
        gate_up_bias=normal(rng, 2 * inner) if has_bias else None,
        is_gelu=is_gelu,
        down=ops.pack_weight([weight_part(rng, down_kind, hidden, inner)]),
        down_bias=normal(rng, hidden) if has_bias else None,
        output_norm=normal(rng, hidden) if has_output_norm else None,
    )


def read_cache(ops: Any, cache: Any, batch: AttentionBatch, head_dim: int, num_heads: int) -> np.ndarray:
    """What queries of all kinds see of the cache: different keys or values would show."""
    query = normal(np.random.default_rng(5), int(batch.query_start[-1]), num_heads, head_dim)
    return ops.paged_attention(query, cache, batch, 1.0)


def deviation(got: np.ndarray, expected: np.ndarray, before: np.ndarray) -> float:
    """Of what was added to the residual: root mean square of the error over that of the value. 8-bit activations are
    off by up to 1/254 of their group's range, in the inputs of two projections."""
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean((expected - before) ** 2)))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"has_bias": True, "kinds": ("float32", "q4", "bfloat16"), "output_kind": "float16"},
    {"has_head_norms": True, "has_output_norm": True, "num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "window": 20},
    {"num_heads": 3, "num_kv_heads": 3, "head_dim": 40, "kinds": ("q8", "q8", "q8"), "output_kind": "float32"},
    {"hidden": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "soft_cap": 4.0, "has_output_norm": True},
]
ROWS = [(1, 1), (7, 7), (1, 40), (5, 90), (33, 33), (1, 130), (40, 150)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("cache_dtype", ["float16", "float32", "int8"])
def test_attention_has_the_bits_of_its_ops_and_the_reference_s_values(cpu, reference, variant, cache_dtype):
    rng = np.random.default_rng(1)
    batch = attention_batch(rng, ROWS, 16, 60, variant.get("window"))
    positions = positions_of(batch)
    results, seen = [], []
    mine, truth = make_attention(cpu, 3, **variant), make_attention(reference, 3, **variant)
    before = normal(rng, len(positions), mine.norm.shape[0])
    for ops, sublayer, run in (
        (cpu, mine, lambda *args: cpu.attention_sublayer(*args)),
        (cpu, mine, lambda *args: run_attention_sublayer(cpu, *args)),
        (reference, truth, lambda *args: reference.attention_sublayer(*args)),
    ):
        cache = ops.allocate_layer_cache(60, 16, sublayer.num_kv_heads, sublayer.head_dim, cache_dtype)
        residual = before.copy()
        run(sublayer, residual, positions, replace(batch, native=None), cache)
        results.append(residual)
        if variant.get("window") is None:
            seen.append(read_cache(ops, cache, batch, sublayer.head_dim, sublayer.num_heads))
    assert np.array_equal(results[0], results[1])
    assert deviation(results[0], results[2], before) < 0.03
    if seen:
        assert np.array_equal(seen[0], seen[1])


MLP_VARIANTS: list[dict[str, Any]] = [
    {},
    {"is_gelu": True, "has_output_norm": True, "kinds": ("q8", "q8"), "down_kind": "q4"},
    {"has_bias": True, "kinds": ("q4", "float16"), "down_kind": "bfloat16"},
    {"hidden": 64, "inner": 96, "kinds": ("float32", "float32"), "down_kind": "float32", "is_gelu": True},
]


@pytest.mark.parametrize("variant", MLP_VARIANTS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 64, 600])
def test_mlp_has_the_bits_of_its_ops_and_the_reference_s_values(cpu, reference, variant, num_rows):
    mine, truth = make_mlp(cpu, 4, **variant), make_mlp(reference, 4, **variant)
    before = normal(np.random.default_rng(num_rows), num_rows, mine.norm.shape[0])
    fused, single, expected = before.copy(), before.copy(), before[:8].copy()
    cpu.mlp_sublayer(mine, fused)
    run_mlp_sublayer(cpu, mine, single)
    reference.mlp_sublayer(truth, expected)
    assert np.array_equal(fused, single)
    assert deviation(fused[:8], expected, before[:8]) < 0.03


def test_a_row_has_the_same_bits_alone_in_chunks_and_with_any_threads(cpu_threads):
    """One sequence of 90 tokens, read at once or in chunks, alone or between others."""
    results = []
    for ops in cpu_threads:
        for chunks, others in (((90,), []), ((1,) * 90, []), ((7, 64, 19), [(1, 30), (20, 20)]), ((89, 1), [(64, 64)])):
            rng = np.random.default_rng(2)
            attention, mlp = make_attention(ops, 8), make_mlp(ops, 9)
            table = rng.permutation(40)[:6].astype(np.int32)
            x = normal(rng, 90, 96)
            cache = ops.allocate_layer_cache(80, 16, 2, 32, "float16")
            done = 0
            for size in chunks:
                batch = attention_batch(rng, [(size, done + size), *others], 16, 40)
                batch.block_tables += 40 * (batch.block_tables >= 0)  # the others' blocks are not ours
                batch.slot_mapping += 40 * 16
                places = np.arange(done, done + size)
                batch.block_tables[0] = -1
                batch.block_tables[0, : min(6, batch.block_tables.shape[1])] = table[: batch.block_tables.shape[1]]
                batch.slot_mapping[:size] = table[places // 16] * np.int64(16) + places % 16
                num_rows = int(batch.query_start[-1])
                residual = normal(rng, num_rows, 96)
                residual[:size] = x[done : done + size]
                ops.attention_sublayer(attention, residual, positions_of(batch), batch, cache)
                ops.mlp_sublayer(mlp, residual)
                x[done : done + size] = residual[:size]
                done += size
            results.append(x)
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.parametrize("isa", runnable_isas())
def test_any_shape_has_the_bits_of_its_ops(isa, data):
    ops = get_cpu(isa)
    head_dim = data.draw(st.integers(1, 24), label="half a head") * 2
    num_kv_heads = data.draw(st.integers(1, 3), label="key heads")
    kinds = data.draw(st.tuples(*[st.sampled_from(["q4", "q8", "float16", "float32"])] * 3), label="kinds")
    num_heads = num_kv_heads * data.draw(st.integers(1, 4), label="queries a key")
    output_kinds = ["float32", "bfloat16"] + ["q4", "q8"] * (num_heads * head_dim % 32 == 0)
    flag = st.booleans()
    sublayer = make_attention(
        ops,
        1,
        hidden=data.draw(st.integers(1, 5), label="hidden groups") * 32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kinds=kinds,
        output_kind=data.draw(st.sampled_from(output_kinds), label="output"),
        has_bias=data.draw(flag, label="bias"),
        has_head_norms=data.draw(flag, label="head norms"),
        has_output_norm=data.draw(flag, label="output norm"),
    )
    counts = data.draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=6), label="rows"
    )
    rng = np.random.default_rng(7)
    batch = attention_batch(rng, [(rows, rows + before) for rows, before in counts], 8, 80)
    positions = positions_of(batch)
    first = normal(rng, len(positions), sublayer.norm.shape[0])
    second = misaligned(first)
    caches = [ops.allocate_layer_cache(80, 8, num_kv_heads, head_dim, "float16") for _ in range(2)]
    ops.attention_sublayer(sublayer, first, positions, batch, caches[0])
    run_attention_sublayer(ops, sublayer, second, positions, batch, caches[1])
    assert np.array_equal(first, second, equal_nan=True)


@pytest.mark.parametrize("kind", ["q4", "q8", "float16"])
def test_logits_have_the_bits_of_their_ops(cpu, reference, kind):
    rng = np.random.default_rng(3)
    part, norm, x = weight_part(rng, kind, 333, 96), normal(rng, 96), normal(rng, 40, 96)
    weight = cpu.pack_weight([part])
    for rows in ([0], [39, 3, 3], list(range(40)), []):
        index = np.array(rows, np.int32)
        got = cpu.logits(x, index, norm, EPS, weight)
        assert np.array_equal(got, cpu.linear(cpu.rms_norm(x[index], norm, EPS), weight))
        assert got.shape == (len(rows), 333)
    expected = reference.logits(x, np.arange(40, dtype=np.int32), norm, EPS, reference.pack_weight([part]))
    assert deviation(cpu.logits(x, np.arange(40, dtype=np.int32), norm, EPS, weight), expected, 0 * expected) < 0.02
    for wrong in (np.array([40], np.int32), np.array([-1], np.int32), np.array([0])):
        with pytest.raises(ShapeError):
            cpu.logits(x, wrong, norm, EPS, weight)
    with pytest.raises(ShapeError):
        cpu.logits(x[:, :64], np.zeros(1, np.int32), norm, EPS, weight)


def test_a_nan_stays_in_its_row(cpu):
    attention, mlp = make_attention(cpu, 1), make_mlp(cpu, 2)
    batch = attention_batch(np.random.default_rng(0), [(1, 1), (1, 1)], 16, 4)
    cache = cpu.allocate_layer_cache(4, 16, 2, 32, "float16")
    residual = normal(np.random.default_rng(1), 2, 96)
    residual[0, 5] = np.nan
    cpu.attention_sublayer(attention, residual, positions_of(batch), batch, cache)
    cpu.mlp_sublayer(mlp, residual)
    assert np.isnan(residual[0]).all()
    assert np.isfinite(residual[1]).all()


def test_what_does_not_fit_is_refused(cpu):
    sublayer, mlp = make_attention(cpu, 1), make_mlp(cpu, 2)
    batch = attention_batch(np.random.default_rng(0), [(2, 20), (1, 5)], 16, 8)
    positions = positions_of(batch)
    cache = cpu.allocate_layer_cache(8, 16, 2, 32, "float16")
    x = np.zeros((3, 96), np.float32)

    def run(**changes: Any) -> None:
        values = {
            "sublayer": sublayer,
            "residual": x,
            "positions": positions,
            "batch": batch,
            "cache": cache,
            **changes,
        }
        attention = replace(values["batch"], native=None)
        cpu.attention_sublayer(values["sublayer"], values["residual"], values["positions"], attention, values["cache"])

    run()
    wrong: list[dict[str, Any]] = [
        {"residual": np.zeros((2, 96), np.float32)},
        {"residual": np.zeros((3, 64), np.float32)},
        {"residual": np.zeros((3, 96))},
        {"positions": positions[:2]},
        {"positions": np.full(3, MAX_POSITIONS, np.int32)},
        {"positions": np.full(3, -1, np.int32)},
        {"cache": cpu.allocate_layer_cache(8, 16, 1, 32, "float16")},
        {"cache": cpu.allocate_layer_cache(1, 16, 2, 32, "float16")},
        {"batch": replace(batch, slot_mapping=np.array([0, 1, 8 * 16]))},
        {"batch": replace(batch, block_tables=np.full_like(batch.block_tables, -1))},
        {"batch": replace(batch, context_lens=np.array([1, 5], np.int32))},
        {"batch": replace(batch, query_start=np.array([0, 2, 2], np.int32))},
        {"sublayer": replace(sublayer, native=None, qkv=mlp.down)},
        {"sublayer": replace(sublayer, native=None, num_heads=5)},
        {"sublayer": replace(sublayer, native=None, norm=np.zeros(95, np.float32))},
        {"sublayer": replace(sublayer, native=None, query_norm=np.zeros(33, np.float32))},
        {"sublayer": replace(sublayer, native=None, rotary=np.zeros((MAX_POSITIONS, 34), np.float32))},
        {"sublayer": replace(sublayer, native=None, output=mlp.gate_up)},
    ]
    for changes in wrong:
        with pytest.raises(ShapeError):
            run(**changes)
    with pytest.raises(ShapeError):
        cpu.mlp_sublayer(replace(mlp, native=None, down=mlp.gate_up), x)
    with pytest.raises(ShapeError):
        cpu.mlp_sublayer(mlp, np.zeros((3, 95), np.float32))
    with pytest.raises(ShapeError):
        cpu.mlp_sublayer(mlp, np.zeros((3, 192), np.float32)[:, ::2])
