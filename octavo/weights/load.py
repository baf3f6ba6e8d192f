"""Names to parameters: checks that a checkpoint has exactly what a model wants, then hands it over piece by piece.

Nothing is read before the check has passed. Memory peaks at the packed weights and the one tensor, or group of tensors
that are packed together, in the making.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from octavo.errors import CorruptFileError, IncompleteWeightsError
from octavo.ops.interface import Array, BFloat16, GroupQuantized, Ops, Weight, WeightData
from octavo.weights.checkpoint import Checkpoint

OnProgress = Callable[[int, int], None]  # (bytes read, bytes in all)

# Left over in many checkpoints and of no use: tables that are computed anew, and the head of a tied model, which
# transformers ignores too.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|attn_rot_embd\.weight$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
_MAX_NAMES_SHOWN = 8


def check_complete(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises IncompleteWeightsError naming what is missing or left over, CorruptFileError for a wrong shape."""
    missing = [name for name in wanted if name not in checkpoint.tensor_shapes]
    left_over = [name for name in checkpoint.tensor_shapes if name not in wanted and not _HARMLESS.search(name)]
    if missing or left_over:
        problems = []
        if missing:
            problems.append(f"{len(missing)} of {len(wanted)} parameters are missing: {_some(missing)}")
        if left_over:
            problems.append(f"{len(left_over)} tensors are no parameters of this model: {_some(left_over)}")
        raise IncompleteWeightsError(f"{checkpoint.path}: {'; '.join(problems)}")
    for name, shape in wanted.items():
        found = tuple(checkpoint.tensor_shapes[name])
        if found != tuple(shape):
            raise CorruptFileError(
                f"{checkpoint.path}: {name} has the shape {list(found)}, but its configuration asks for {list(shape)}"
            )


class ParameterLoader:
    """A `ParameterSource` (octavo.models.layers) over a checkpoint.

    dtype:       "auto" keeps the stored format; "float32", "float16", "bfloat16" convert, from exact numbers
    on_progress: called after each read
    num_bytes:   of all that was handed out, on the device
    """

    def __init__(
        self,
        ops: Ops,
        checkpoint: Checkpoint,
        wanted: Mapping[str, tuple[int, ...]],
        dtype: str = "auto",
        on_progress: OnProgress | None = None,
    ):
        check_complete(checkpoint, wanted)
        self._ops = ops
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._on_progress = on_progress
        self._bytes_read = 0
        self._bytes_wanted = sum(checkpoint.num_bytes(name) for name in wanted)
        self.num_bytes = 0

    def weight(self, names: Sequence[str]) -> Weight:
        is_exact = self._dtype != "auto"
        weight = self._ops.pack_weight([self._checkpoint.read(name, is_exact) for name in names], self._dtype)
        self._has_read(names, weight.num_bytes)
        return weight

    def vector(self, names: Sequence[str]) -> Array:
        parts = [_to_float32(self._checkpoint.read(name, exact_float=True)) for name in names]
        vector = np.concatenate(parts)  # also a copy: what it was read from is a file's memory map
        self._has_read(names, vector.nbytes)
        return self._ops.to_device(vector)

    def _has_read(self, names: Sequence[str], num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_read += sum(self._checkpoint.num_bytes(name) for name in names)
        if self._on_progress is not None:
            self._on_progress(self._bytes_read, self._bytes_wanted)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return shown if len(names) <= _MAX_NAMES_SHOWN else f"{shown} and {len(names) - _MAX_NAMES_SHOWN} more"


def _to_float32(data: WeightData) -> np.ndarray:
    if isinstance(data, BFloat16):
        return data.to_float32()
    assert not isinstance(data, GroupQuantized), "a vector in codes"
    return data.astype(np.float32)
