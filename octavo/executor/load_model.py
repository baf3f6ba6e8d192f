"""A checkpoint to a model that runs on one backend."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.config import ARCHITECTURES, ModelConfig
from octavo.models.config_gguf import config_from_gguf
from octavo.models.config_hf import architecture_of_hf, config_from_hf
from octavo.models.registry import MODEL_CLASSES, DecoderModel
from octavo.models.rope import rotary_table
from octavo.ops.interface import Ops
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.load import OnProgress, ParameterLoader


def load_model_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> ModelConfig:
    """What a checkpoint says about its model; reads no weights.

    Raises UnsupportedModelError for what we cannot run, with the name of the setting or the architecture.
    """
    if checkpoint.gguf_metadata is not None:
        return config_from_gguf(checkpoint.gguf_metadata, checkpoint.raw_tensor_shapes, checkpoint.rope_divisors)
    assert checkpoint.hf_config is not None
    _refuse_remote_code(checkpoint.hf_config, trust_remote_code)
    return config_from_hf(checkpoint.hf_config, checkpoint.generation_config)


def load_model(
    ops: Ops,
    checkpoint: Checkpoint,
    dtype: str = "auto",
    on_progress: OnProgress | None = None,
    *,
    max_positions: int | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> DecoderModel:
    """Read, check and pack the whole model.

    dtype:         of the weight matrices that are floats: "auto" (as stored), "float32", "float16" or "bfloat16"
    quantization:  "checkpoint", "none", "int8" or "int4", as `ParameterLoader` says; None is "checkpoint", and "none"
                   where a dtype is given
    on_progress:   called with (bytes read, bytes in all)
    max_positions: the longest context that will be run, to size the rotary tables; the model's own limit when None
    """
    config = load_model_config(checkpoint, trust_remote_code)
    model_class = MODEL_CLASSES[config.architecture]
    if quantization is None:
        quantization = "checkpoint" if dtype == "auto" else "none"
    if quantization == "checkpoint":
        refuse_reordered(checkpoint)
    wanted = model_class.parameter_shapes(config)
    loader = ParameterLoader(ops, checkpoint, wanted, dtype, on_progress, quantization=quantization)
    num_positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
    ropes = {config.rope_of_layer(layer) for layer in range(config.num_layers)}
    tables = {rope: rotary_table(rope, num_positions) for rope in ropes}
    model = model_class(config, loader, {rope: ops.to_device(table) for rope, table in tables.items()})
    model.num_weight_bytes = loader.num_bytes + sum(table.nbytes for table in tables.values())
    model.matrix_bytes = loader.matrix_bytes
    return model


def count_table_bytes(config: ModelConfig, max_positions: int) -> int:
    """What the rotary tables for so many positions take, as part of a model's num_weight_bytes."""
    ropes = {config.rope_of_layer(layer) for layer in range(config.num_layers)}
    return max_positions * sum(rotary_table(rope, 1).nbytes for rope in ropes)


def refuse_reordered(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModelError for weights that cannot stay in their codes."""
    if checkpoint.reordered is not None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: {checkpoint.reordered} has its inputs in an activation order (desc_act, actorder), "
            "which Octavo cannot keep in the checkpoint's codes. --quantization int8 packs such weights anew, with a "
            "small error; --dtype float32 runs them exactly."
        )


def _refuse_remote_code(hf_config: dict, trust_remote_code: bool) -> None:
    """A checkpoint that brings code of its own is fine as long as we have its architecture ourselves."""
    if not hf_config.get("auto_map"):
        return
    try:
        architecture_of_hf(hf_config)
    except UnsupportedModelError as error:
        have = f"it has these architectures of its own: {', '.join(ARCHITECTURES)}"
        if trust_remote_code:
            raise UnsupportedModelError(
                f"{error}. The checkpoint brings its own code, but Octavo runs no model code from checkpoints today, "
                f"--trust-remote-code or not; {have}"
            ) from None
        raise UnsupportedModelError(
            f"{error}. The checkpoint brings its own code, which needs --trust-remote-code. "
            f"Note that Octavo runs no model code from checkpoints today even then; {have}"
        ) from None
