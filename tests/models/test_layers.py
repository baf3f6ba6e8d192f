"""Layers whose projections were replaced after construction, as an adapter does: op by op, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.models.layers import Linear
from octavo.models.llama import LlamaModel
from octavo.models.rope import rotary_table
from octavo.ops.interface import Array, Ops
from tests.executor.tiny_model import MAX_MODEL_LEN, RandomParameters, make_model_config
from tests.models.backends import BACKENDS, make_ops
from tests.models.harness import ModelHarness

PROMPT = [5, 9, 11, 30, 2, 2, 60, 1, 7]


class Wrapped:
    """What stands in for a Linear; adds `shift` to its outputs."""

    def __init__(self, base: Linear, shift: float = 0.0):
        self.base, self.shift = base, shift
        self.num_calls = 0

    def __call__(self, ops: Ops, x: Array) -> Array:
        self.num_calls += 1
        out = self.base(ops, x)
        return out if self.shift == 0.0 else out + np.float32(self.shift)


@pytest.fixture(params=BACKENDS)
def harness(request: pytest.FixtureRequest) -> ModelHarness:
    config = make_model_config()
    ops = make_ops(request.param)
    rotary = {config.rope: ops.to_device(rotary_table(config.rope, MAX_MODEL_LEN))}
    return ModelHarness(ops, LlamaModel(config, RandomParameters(ops, LlamaModel.parameter_shapes(config)), rotary))


@pytest.mark.parametrize("part", ["attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"])
def test_a_wrapped_projection_is_called_and_changes_no_bit_by_being_wrapped(harness: ModelHarness, part: str) -> None:
    expected = harness.logits_of(PROMPT)
    layer = harness.model.layers[1]  # type: ignore[attr-defined]
    owner, name = getattr(layer, part.split(".")[0]), part.split(".")[1]
    wrapped = Wrapped(getattr(owner, name))
    setattr(owner, name, wrapped)
    assert np.array_equal(harness.logits_of(PROMPT), expected)
    assert wrapped.num_calls == 1
    wrapped.shift = 0.1
    assert not np.array_equal(harness.logits_of(PROMPT), expected)
    setattr(owner, name, wrapped.base)
    assert np.array_equal(harness.logits_of(PROMPT), expected)
