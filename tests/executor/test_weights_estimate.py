"""What a model takes is known before it is read, so that the way out of a memory error works when it is typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.engine_args import EngineArgs
from octavo.errors import ConfigError
from octavo.executor.load_model import count_table_bytes, load_model, load_model_config
from octavo.executor.local import LocalExecutor
from octavo.machine import Machine
from octavo.ops.cpu import CpuOps
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.load import estimate_weights_bytes
from octavo.weights.source import resolve_source

# Q4_1 and Q8_0; Q4_K, Q6_K, Q5_0 and Q8_0.
MODELS = ["smollm2_gguf", "gemma3_gguf"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("quantization", "dtype"), [("checkpoint", "auto"), ("int8", "auto"), ("int4", "auto"), ("none", "float16")]
)
def test_the_estimate_is_what_the_weights_take(
    model: str, quantization: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(resolve_source(str(request.getfixturevalue(model))))
    estimate = estimate_weights_bytes(checkpoint, dtype, quantization)
    estimate += count_table_bytes(load_model_config(checkpoint), 64)
    loaded = load_model(CpuOps(num_threads=1), checkpoint, dtype, max_positions=64, quantization=quantization)
    assert estimate == loaded.num_weight_bytes


@pytest.mark.parametrize("model", MODELS)
def test_the_share_that_an_error_names_starts_the_model(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    machine = Machine(total_bytes=8 * 2**30, available_bytes=6 * 2**30, num_cores=1, num_cpus=1)

    def start(share: float) -> LocalExecutor:
        args = EngineArgs(model=str(path), gpu_memory_utilization=share, threads=1)
        return LocalExecutor.load(args, resolve_source(str(path)), machine=machine)

    with pytest.raises(ConfigError) as caught:
        start(0.01)
    match = re.search(r"--gpu-memory-utilization (\S+) or more; (\S+) is enough for one sequence", caught.value.message)
    assert match is not None
    assert start(float(match[1])).config.core.max_model_len >= 16
    assert start(float(match[2])).config.max_model_len_reason == "model"
