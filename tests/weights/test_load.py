"""From names to parameters: completeness, shapes, conversion, progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import CorruptFileError, IncompleteWeightsError
from octavo.ops.interface import GroupQuantized, WeightData
from octavo.ops.reference import ReferenceOps
from octavo.weights.load import ParameterLoader, check_complete


@dataclass
class FakeCheckpoint:
    """Tensors from a dict; `exact` overrides what exact_float gives. Every tensor counts 10 bytes."""

    tensors: dict[str, WeightData]
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    path: Path = Path("model.gguf")
    format: str = "gguf"
    hf_config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    gguf_metadata: dict[str, Any] | None = None
    rope_divisors: tuple[float, ...] | None = None
    weights_bytes: int = 0
    quantization: str | None = None
    reordered: str | None = None
    reads: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: data.shape for name, data in self.tensors.items()}

    raw_tensor_shapes = tensor_shapes

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def num_bytes(self, name: str) -> int:
        return 10

    def read(self, name: str, exact_float: bool = False) -> WeightData:
        self.reads.append(name)
        return self.exact[name] if exact_float and name in self.exact else self.tensors[name]

    def release(self, names: Iterable[str]) -> None:
        self.released += names


def matrix(num_rows: int, fill: float = 1.0) -> np.ndarray:
    return np.full((num_rows, 32), fill, np.float32)


def test_a_complete_checkpoint_passes() -> None:
    check_complete(FakeCheckpoint({"a": matrix(2)}), {"a": (2, 32)})


def test_missing_and_left_over_are_both_named_before_anything_is_read() -> None:
    checkpoint = FakeCheckpoint({"a": matrix(2), "extra": matrix(1)})
    with pytest.raises(IncompleteWeightsError) as raised:
        ParameterLoader(ReferenceOps(), checkpoint, {"a": (2, 32), "b": (2, 32)})
    message = "model.gguf: 1 of 2 parameters are missing: b; 1 tensors are no parameters of this model: extra"
    assert str(raised.value) == message
    assert checkpoint.reads == []


def test_a_long_list_of_missing_parameters_is_cut() -> None:
    with pytest.raises(IncompleteWeightsError, match=r"20 of 20 parameters are missing: p0, p1, .* and 12 more"):
        check_complete(FakeCheckpoint({}), {f"p{index}": (1,) for index in range(20)})


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_known_useless_tensors_may_be_left_over(name: str) -> None:
    check_complete(FakeCheckpoint({"a": matrix(2), name: matrix(1)}), {"a": (2, 32)})


def test_a_wrong_shape_is_told_with_both_shapes() -> None:
    with pytest.raises(CorruptFileError, match=r"a has the shape \[3, 32\], .* asks for \[2, 32\]"):
        check_complete(FakeCheckpoint({"a": matrix(3)}), {"a": (2, 32)})


def test_fused_weights_lie_side_by_side_and_progress_counts_stored_bytes() -> None:
    checkpoint = FakeCheckpoint({"q": matrix(2, 1), "k": matrix(1, 2), "norm": np.ones(32, np.float16)})
    wanted = {name: data.shape for name, data in checkpoint.tensors.items()}
    progress: list[tuple[int, int]] = []
    loader = ParameterLoader(
        ReferenceOps(), checkpoint, wanted, on_progress=lambda done, total: progress.append((done, total))
    )
    weight = loader.weight(["q", "k"])
    assert weight.shape == (3, 32)
    np.testing.assert_array_equal(weight.values[:, 0], [1, 1, 2])
    norm = loader.vector(["norm"])
    assert norm.dtype == np.float32
    assert progress == [(20, 30), (30, 30)]
    assert loader.num_bytes == weight.num_bytes + norm.nbytes


def codes(num_rows: int) -> GroupQuantized:
    return GroupQuantized(np.ones((num_rows, 32), np.int8), np.ones((num_rows, 1), np.float32), None, bits=8)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", 1.0), ("float32", 1.25), ("float16", 1.25)])
def test_codes_are_kept_by_default_and_converted_from_exact_numbers_otherwise(dtype: str, expected: float) -> None:
    checkpoint = FakeCheckpoint({"a": codes(2)}, exact={"a": matrix(2, 1.25)})
    quantization = "checkpoint" if dtype == "auto" else "none"
    loader = ParameterLoader(ReferenceOps(), checkpoint, {"a": (2, 32)}, dtype, quantization=quantization)
    weight = loader.weight(["a"])
    assert weight.dtype == ("q8" if dtype == "auto" else dtype)
    np.testing.assert_array_equal(weight.values, matrix(2, expected))


def test_a_vector_is_a_copy_that_can_be_written() -> None:
    stored = np.ones(4, np.float32)
    stored.flags.writeable = False
    vector = ParameterLoader(ReferenceOps(), FakeCheckpoint({"v": stored}), {"v": (4,)}).vector(["v"])
    assert vector.flags.writeable
    assert not np.shares_memory(vector, stored)
