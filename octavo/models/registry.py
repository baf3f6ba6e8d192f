"""Which class runs which architecture. A new model is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from octavo.models.config import ModelConfig
from octavo.models.gemma3 import Gemma3Model
from octavo.models.layers import ParameterSource, Shapes
from octavo.models.llama import LlamaModel
from octavo.models.qwen3 import Qwen3Model
from octavo.models.rope import RopeConfig
from octavo.ops.interface import Array, ForwardBatch, LayerCache, Ops


class DecoderModel(Protocol):
    """What every model class offers.

    num_weight_bytes: device memory of all parameters and tables
    matrix_bytes:     of the weight matrices, by format: "4-bit", "8-bit", "float16", ...
    """

    config: ModelConfig
    num_weight_bytes: int
    matrix_bytes: dict[str, int]

    def __init__(self, config: ModelConfig, source: ParameterSource, rotary: Mapping[RopeConfig, Array]) -> None: ...

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> Shapes:
        """Every parameter it wants: Hugging Face name -> shape."""
        ...

    def __call__(self, ops: Ops, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Array:
        """Logits of the wanted rows, [len(batch.logits_rows), vocab_size] float32; writes to the cache."""
        ...


MODEL_CLASSES: dict[str, type[DecoderModel]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": Qwen3Model,
    "gemma3": Gemma3Model,
}
