"""The adapters in memory: read when they are loaded, the least recently used one forgotten when there are too many and
read again when it is next used.

Which adapters a batch may mix is the core's affair; here an adapter is a number, a path, and packed matrices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelSourceError
from octavo.lora.adapter import (
    ATTENTION_INPUTS,
    MLP_INPUTS,
    Adapter,
    LoraMatrices,
    pack_matrices,
    projection_shapes,
    refuse_missing,
)
from octavo.lora.gguf import read_gguf
from octavo.lora.peft import WEIGHTS_FILE, read_peft
from octavo.models.config import ModelConfig
from octavo.ops.interface import LoraPart, LoraWeight, Ops


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """layers: for each layer, what it adds to qkv, output, gate_up and down; None where it adds nothing."""

    layers: tuple[tuple[LoraWeight | None, ...], ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where an adapter came from. stamp: of its file, to notice that it was replaced."""

    path: Path
    stamp: tuple[int, int]


class AdapterManager:
    """keeps_float32: float32 matrices stay so, else they are kept in float16."""

    def __init__(self, ops: Ops, config: ModelConfig, max_rank: int, max_in_memory: int, keeps_float32: bool = False):
        self._ops = ops
        self._config = config
        self._max_rank = max_rank
        self._max_in_memory = max_in_memory
        self._keeps_float32 = keeps_float32
        self._origins: dict[int, _Origin] = {}
        self._packed: OrderedDict[int, PackedAdapter] = OrderedDict()  # the least recently used one first

    @property
    def num_bytes(self) -> int:
        """Of the adapters in memory."""
        return sum(packed.num_bytes for packed in self._packed.values())

    @property
    def num_in_memory(self) -> int:
        return len(self._packed)

    def load(self, adapter_id: int, path: str) -> tuple[Adapter, int]:
        """Read, check and keep an adapter. Returns it with its bytes in memory. Raises ModelLoadError."""
        assert adapter_id > 0, adapter_id
        assert adapter_id not in self._origins, adapter_id
        origin = _Origin(Path(path), _stamp_of(Path(path)))
        adapter = self._read(origin.path)
        packed = self._pack(adapter)
        self._origins[adapter_id] = origin
        self._keep(adapter_id, packed, ())
        return adapter, packed.num_bytes

    def unload(self, adapter_id: int) -> None:
        self._origins.pop(adapter_id, None)
        self._packed.pop(adapter_id, None)

    def get(self, adapter_id: int, in_use: Iterable[int] = ()) -> PackedAdapter:
        """in_use: those that must not be forgotten now. Raises ModelLoadError when it has to be read again and cannot
        be, or is not the same any more."""
        packed = self._packed.get(adapter_id)
        if packed is not None:
            self._packed.move_to_end(adapter_id)
            return packed
        origin = self._origins.get(adapter_id)
        if origin is None:
            raise ModelSourceError(f"the adapter {adapter_id} was unloaded")
        if _stamp_of(origin.path) != origin.stamp:
            raise ModelSourceError(
                f"{origin.path}: the adapter's file changed after it was loaded; load it again to use the new one"
            )
        packed = self._pack(self._read(origin.path))
        self._keep(adapter_id, packed, in_use)
        return packed

    def _keep(self, adapter_id: int, packed: PackedAdapter, in_use: Iterable[int]) -> None:
        self._packed[adapter_id] = packed
        if len(self._packed) > self._max_in_memory:
            kept = {adapter_id, *in_use}
            unused = [each for each in self._packed if each not in kept]
            for each in unused[: len(self._packed) - self._max_in_memory]:
                del self._packed[each]

    def _read(self, path: Path) -> Adapter:
        refuse_missing(path)
        read = read_peft if path.is_dir() else read_gguf
        return read(path, self._config, self._max_rank)

    def _pack(self, adapter: Adapter) -> PackedAdapter:
        shapes = projection_shapes(self._config)
        query, key = shapes["q_proj"][0], shapes["k_proj"][0]
        inner = shapes["gate_proj"][0]
        first_output = {"k_proj": query, "v_proj": query + key, "up_proj": inner}
        weights = (
            (("qkv_proj", *ATTENTION_INPUTS), shapes["qkv_proj"]),
            (("o_proj",), shapes["o_proj"]),
            (("gate_up_proj", *MLP_INPUTS), shapes["gate_up_proj"]),
            (("down_proj",), shapes["down_proj"]),
        )
        layers = []
        num_bytes = 0
        for layer in range(self._config.num_layers):
            packed = []
            for names, (num_outputs, num_inputs) in weights:
                parts = [
                    self._part(adapter.matrices[layer, name], first_output.get(name, 0))
                    for name in names
                    if (layer, name) in adapter.matrices
                ]
                weight = self._ops.pack_lora(parts, num_outputs, num_inputs) if parts else None
                num_bytes += 0 if weight is None else weight.num_bytes
                packed.append(weight)
            layers.append(tuple(packed))
        return PackedAdapter(tuple(layers), num_bytes)

    def _part(self, matrices: LoraMatrices, first_output: int) -> LoraPart:
        packed = pack_matrices(matrices, self._keeps_float32)
        return LoraPart(first_output, packed.down, packed.up, packed.scale)


def _stamp_of(path: Path) -> tuple[int, int]:
    """Of the file with the matrices; (0, 0) when there is none."""
    try:
        status = (path / WEIGHTS_FILE if path.is_dir() else path).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
