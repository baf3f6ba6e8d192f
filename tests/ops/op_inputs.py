"""Random inputs for the ops, and arrays that start at an odd float or have gaps between rows."""

from __future__ import annotations

import numpy as np

from octavo.ops.interface import AttentionBatch, BFloat16, GroupQuantized, SamplingBatch, WeightData


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def misaligned(x: np.ndarray, offset: int = 1) -> np.ndarray:
    """The same values in memory that starts `offset` floats after an aligned address."""
    memory = np.empty(x.size + offset, x.dtype)
    view = memory[offset:].reshape(x.shape)
    view[...] = x
    return view


def with_gaps(x: np.ndarray, gap: int = 5) -> np.ndarray:
    """The same rows, as columns [2, 2 + width) of a wider array of NaNs."""
    flat = x.reshape(len(x), -1)
    wide = np.full((len(x), flat.shape[1] + gap), np.nan, x.dtype)
    wide[:, 2 : 2 + flat.shape[1]] = flat
    view = wide[:, 2 : 2 + flat.shape[1]]
    return (
        view.reshape(x.shape)
        if x.ndim == 2
        else np.lib.stride_tricks.as_strided(view, x.shape, (wide.strides[0], *x.strides[1:]))
    )


def quantized(
    rng: np.random.Generator, num_rows: int, width: int, bits: int, *, minimum: bool = True, exact_half: bool = True
) -> GroupQuantized:
    """Codes over their whole range; scales that a float16 holds, or not."""
    if bits == 4:
        codes = rng.integers(0, 16, (num_rows, width)).astype(np.uint8)
    else:
        codes = rng.integers(-128, 128, (num_rows, width)).astype(np.int8)

    def numbers(low: float, high: float) -> np.ndarray:
        values = rng.uniform(low, high, (num_rows, width // 32)).astype(np.float32)
        return values.astype(np.float16).astype(np.float32) if exact_half else values

    return GroupQuantized(codes, numbers(0.002, 0.02), numbers(-0.2, 0.1) if minimum else None, bits)


def weight_part(rng: np.random.Generator, kind: str, num_rows: int, width: int) -> WeightData:
    if kind == "q4":
        return quantized(rng, num_rows, width, 4)
    if kind == "q4-float-scales":
        return quantized(rng, num_rows, width, 4, exact_half=False)
    if kind == "q8":
        return quantized(rng, num_rows, width, 8, minimum=False)
    if kind == "q8-minimum":
        return quantized(rng, num_rows, width, 8, exact_half=False)
    values = normal(rng, num_rows, width)
    if kind == "bfloat16":
        return BFloat16((values.view(np.uint32) >> 16).astype(np.uint16))
    return values.astype(kind)


QUANTIZED_KINDS = ("q4", "q4-float-scales", "q8", "q8-minimum")
FLOAT_KINDS = ("float32", "float16", "bfloat16")


def attention_batch(
    rng: np.random.Generator,
    rows_and_contexts: list[tuple[int, int]],
    block_size: int,
    num_blocks: int,
    window: int | None = None,
) -> AttentionBatch:
    """Sequences of (rows, context length) in blocks in random order; blocks a window has passed are -1."""
    free = list(rng.permutation(num_blocks))
    max_blocks = max(-(-context // block_size) for _, context in rows_and_contexts) + 1
    tables = np.full((len(rows_and_contexts), max_blocks), -1, np.int32)
    slots: list[int] = []
    starts = [0]
    for sequence, (num_rows, context) in enumerate(rows_and_contexts):
        for block in range(-(-context // block_size)):
            tables[sequence, block] = free.pop()
        for position in range(context - num_rows, context):
            slots.append(int(tables[sequence, position // block_size]) * block_size + position % block_size)
        if window is not None:
            tables[sequence, : max(0, context - num_rows - window + 1) // block_size] = -1
        starts.append(starts[-1] + num_rows)
    return AttentionBatch(
        query_start=np.array(starts, np.int32),
        context_lens=np.array([context for _, context in rows_and_contexts], np.int32),
        block_tables=tables,
        slot_mapping=np.array(slots, np.int64),
    )


def sampling_batch(num_rows: int, **fields: object) -> SamplingBatch:
    """Greedy and nothing else, but for the fields given: one value for all rows, or an array."""
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "random": 0.5, "num_logprobs": -1}
    dtypes = {"top_k": np.int32, "random": np.float64, "num_logprobs": np.int32}
    arrays = {}
    for name, default in defaults.items():
        value = np.asarray(fields.pop(name, default), dtypes.get(name, np.float32))
        arrays[name] = np.ascontiguousarray(np.broadcast_to(value, (num_rows,)))
    return SamplingBatch(**arrays, **fields)  # type: ignore[arg-type]
