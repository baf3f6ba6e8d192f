"""A LoRA adapter as plain arrays, read from a PEFT folder or from a GGUF file as llama.cpp writes it, and checked.

What an adapter does to a model beyond adding scale * B A x to the seven projections of its layers is refused by name,
here, before anything changes. Hu et al. 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.errors import CorruptFileError, IncompleteWeightsError, ModelSourceError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.ops.interface import BFloat16

# The projections, in the order in which their outputs lie side by side; and the fused forms of some checkpoints.
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
MLP_INPUTS = ("gate_proj", "up_proj")
PARENT_OF = {
    **dict.fromkeys((*ATTENTION_INPUTS, "qkv_proj", "o_proj"), "self_attn"),
    **dict.fromkeys((*MLP_INPUTS, "gate_up_proj", "down_proj"), "mlp"),
}
_PARTS_OF = {"qkv_proj": ATTENTION_INPUTS, "gate_up_proj": MLP_INPUTS}
_MAX_SHOWN = 4

Module = tuple[int, str]  # (layer, projection)
FloatArray = np.ndarray | BFloat16


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """What is added to one projection [N, K]: scale * up(down(x)).

    down: [r, K], lora_A; up: [N, r], lora_B; of one kind
    """

    down: FloatArray
    up: FloatArray
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """base_model_name: what it says that it was trained on; empty when it does not say."""

    matrices: Mapping[Module, LoraMatrices]
    base_model_name: str

    @property
    def rank(self) -> int:
        return max(matrices.rank for matrices in self.matrices.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """In the order of a layer."""
        present = {name for _, name in self.matrices}
        return tuple(name for name in PARENT_OF if name in present)


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of a layer's projections, and of the fused ones."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    shapes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return shapes | {fused: (sum(shapes[part][0] for part in parts), hidden) for fused, parts in _PARTS_OF.items()}


def count_elements_per_rank(config: ModelConfig) -> int:
    """Numbers in an adapter of rank 1 on all projections."""
    shapes = projection_shapes(config)
    return config.num_layers * sum(sum(shapes[name]) for name in shapes if name not in _PARTS_OF)


class AdapterBuilder:
    """Collects the matrices of one adapter, and checks each against the model.

    path: the adapter's, for errors
    """

    def __init__(self, path: Path, config: ModelConfig, max_rank: int):
        self.path = path
        self._config = config
        self._shapes = projection_shapes(config)
        self._max_rank = max_rank
        self._matrices: dict[Module, LoraMatrices] = {}

    @property
    def modules(self) -> set[Module]:
        return set(self._matrices)

    def add(self, module: Module, down: FloatArray, up: FloatArray, scale: float) -> None:
        layer, name = module
        what = describe_module(module)
        if layer >= self._config.num_layers:
            raise UnsupportedModelError(
                f"{self.path}: adds to layer {layer}, but the model has {self._config.num_layers} layers; the adapter "
                "was made for another base model"
            )
        num_outputs, num_inputs = self._shapes[name]
        rank = down.shape[0]
        if len(down.shape) != 2 or len(up.shape) != 2 or up.shape[1] != rank or rank == 0:
            raise CorruptFileError(
                f"{self.path}: the matrices of {what} are {list(down.shape)} and {list(up.shape)}, not [r, inputs] and "
                "[outputs, r]"
            )
        if (up.shape[0], down.shape[1]) != (num_outputs, num_inputs):
            raise UnsupportedModelError(
                f"{self.path}: {what} is for a weight of [{up.shape[0]}, {down.shape[1]}], but the model's is "
                f"[{num_outputs}, {num_inputs}]; the adapter was made for another base model"
            )
        if rank > self._max_rank:
            raise UnsupportedModelError(
                f"{self.path}: {what} has rank {rank}, but at most {self._max_rank} are allowed; start with "
                f"--max-lora-rank {rank}"
            )
        for values, matrix in ((down, "A"), (up, "B")):
            if not np.isfinite(_to_float32(values)).all():
                raise CorruptFileError(
                    f"{self.path}: lora_{matrix} of {what} has values that are not finite (NaN or infinite); the "
                    "training diverged, or the file is damaged"
                )
        if not np.isfinite(np.float32(scale)):
            raise CorruptFileError(f"{self.path}: the scale of {what} is {scale}, not a finite number")
        self._matrices[module] = LoraMatrices(down, up, scale)

    def build(self, base_model_name: str) -> Adapter:
        if not self._matrices:
            raise IncompleteWeightsError(f"{self.path}: has no LoRA matrices")
        for layer, name in self._matrices:
            for part in _PARTS_OF.get(name, ()):
                if (layer, part) in self._matrices:
                    raise CorruptFileError(
                        f"{self.path}: has {describe_module((layer, name))} and {describe_module((layer, part))}, "
                        "which is a part of it"
                    )
        return Adapter(matrices=self._matrices, base_model_name=base_model_name)


def pair_up(path: Path, halves: Mapping[Module, Mapping[str, str]]) -> None:
    """halves: for each module, the tensors of "a" and "b". Raises IncompleteWeightsError when one is missing."""
    lonely = [describe_module(module) for module, names in halves.items() if set(names) != {"a", "b"}]
    if lonely:
        raise IncompleteWeightsError(
            f"{path}: only one of the two matrices is there for {list_some(lonely)}; the file is incomplete"
        )


def describe_module(module: Module) -> str:
    layer, name = module
    return f"model.layers.{layer}.{PARENT_OF[name]}.{name}"


def list_some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return shown if len(names) <= _MAX_SHOWN else f"{shown} and {len(names) - _MAX_SHOWN} more"


def refuse_missing(path: Path) -> None:
    if not path.exists():
        raise ModelSourceError(
            f"{path}: there is no such adapter; give a folder with adapter_config.json and adapter_model.safetensors, "
            "or a GGUF file"
        )


def pack_matrices(matrices: LoraMatrices, keeps_float32: bool) -> LoraMatrices:
    """As they are kept in memory: 16-bit floats as they come, float32 as float16 unless `keeps_float32`.

    Before they are rounded to float16, a power of two that goes into the scale brings each matrix's largest value next
    to 1, so that neither a large value overflows nor small ones lose bits: LoRA's B is often below float16's normal
    range.
    """
    kinds = {_kind(matrices.down), _kind(matrices.up)}
    if keeps_float32:
        return LoraMatrices(_to_float32(matrices.down), _to_float32(matrices.up), matrices.scale)
    if len(kinds) == 1 and kinds <= {"float16", "bfloat16"}:
        return matrices
    down, down_exponent = _to_half(_to_float32(matrices.down))
    up, up_exponent = _to_half(_to_float32(matrices.up))
    return LoraMatrices(down, up, float(np.ldexp(matrices.scale, down_exponent + up_exponent)))


def _to_half(values: np.ndarray) -> tuple[np.ndarray, int]:
    """(half, exponent): values are about half * 2^exponent."""
    exponent = int(np.frexp(np.abs(values).max(initial=0.0))[1])
    return np.ldexp(values, -exponent).astype(np.float16), exponent


def _to_float32(values: FloatArray) -> np.ndarray:
    return values.to_float32() if isinstance(values, BFloat16) else values.astype(np.float32)


def _kind(values: FloatArray) -> str:
    return "bfloat16" if isinstance(values, BFloat16) else values.dtype.name
