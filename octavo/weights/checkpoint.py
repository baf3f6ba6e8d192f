"""One view of a model's files, whatever their format: tensors under their Hugging Face names, with one meaning.

Canonical means:
- names are those of the Hugging Face text model ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight")
- the rows of q and k are in Hugging Face order: dimension i of a head is rotated with i + head_dim / 2. (GGUF files of
  the llama architecture store such pairs side by side; their rows are put back here.)
- a norm weight is the full factor. (Hugging Face Gemma 3 stores w - 1, and the 1 is added here; GGUF has added it.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.errors import CorruptFileError, ModelSourceError, UnsupportedModelError
from octavo.ops.interface import BFloat16, GroupQuantized, WeightData
from octavo.quant.ggml import FLOAT_TYPES
from octavo.quant.schemes import scheme_from_config
from octavo.quant.stored import QuantScheme, ReadPart, StoredModule
from octavo.weights.gguf import GGUFFile
from octavo.weights.safetensors import SafetensorsFolder

Shapes = Mapping[str, tuple[int, ...]]

_ROPE_DIVISORS = "rope_freqs.weight"


class CheckpointSource(Protocol):
    """What `octavo.weights.source.ModelSource` offers: kind is "folder" or "gguf"."""

    @property
    def path(self) -> Path: ...

    @property
    def kind(self) -> str: ...


class Checkpoint(Protocol):
    """format:            "gguf" or "safetensors"
    path:              the file or the folder
    hf_config:         config.json, or None for GGUF; generation_config: generation_config.json where there is one
    gguf_metadata:     of a GGUF file, else None
    tensor_shapes:     canonical name -> shape, NumPy order; in the order of the file
    raw_tensor_shapes: the same by the names in the file, all of them
    rope_divisors:     what a GGUF file's rope_freqs tensor holds (Llama 3), else None
    weights_bytes:     of all tensors, as stored
    quantization:      how matrices are stored in codes: "gguf", "gptq", "awq", "compressed-tensors"; None when none is
    reordered:         a matrix whose inputs belong to groups in no order (GPTQ's activation order), so that it cannot
                       be kept in codes; None when there is no such matrix
    """

    format: str
    path: Path
    hf_config: dict[str, Any] | None
    generation_config: dict[str, Any] | None
    gguf_metadata: dict[str, Any] | None
    tensor_shapes: Shapes
    raw_tensor_shapes: Shapes
    rope_divisors: tuple[float, ...] | None
    weights_bytes: int
    quantization: str | None
    reordered: str | None

    @property
    def tensor_names(self) -> tuple[str, ...]: ...

    def num_bytes(self, name: str) -> int:
        """Of one tensor, as stored."""
        ...

    def has_half_scales(self, name: str) -> bool:
        """Whether the format's scales and minimums, if it has codes, are float16 by themselves and not by a product."""

    def read(self, name: str, exact_float: bool = False) -> WeightData:
        """One tensor. exact_float: exact float32 where it is stored in codes. Raises KeyError for an unknown name."""
        ...

    def release(self, names: Iterable[str]) -> None:
        """These tensors have been read and copied: their pages of the file need not stay in memory."""
        ...


def open_checkpoint(source: CheckpointSource) -> Checkpoint:
    """Open what a source points to; reads headers only. Raises ModelLoadError's children with a sentence."""
    path = Path(source.path)
    if source.kind == "gguf":
        return GGUFCheckpoint(path)
    if not (path / "config.json").exists():
        gguf_files = sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return GGUFCheckpoint(gguf_files[0])
        if gguf_files:
            names = ", ".join(file.name for file in gguf_files[:5])
            raise ModelSourceError(f"{path}: has {len(gguf_files)} GGUF files ({names}); name the one you mean")
        raise ModelSourceError(f"{path}: is no model: it has neither a config.json nor a .gguf file")
    return SafetensorsCheckpoint(path)


# --- safetensors ----------------------------------------------------------------------------------------------

# Where models that also see images keep their text part: transformers since 4.52, and before.
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_NOT_TEXT = re.compile(r"^(model\.)?(vision_tower|vision_model|multi_modal_projector)\.")


class SafetensorsCheckpoint:
    """A Hugging Face folder."""

    format = "safetensors"

    def __init__(self, folder: Path):
        self.path = folder
        config = _read_json(folder / "config.json")
        self.hf_config: dict[str, Any] | None = config
        generation_path = folder / "generation_config.json"
        self.generation_config = _read_json(generation_path) if generation_path.exists() else None
        self.gguf_metadata: dict[str, Any] | None = None
        self.rope_divisors: tuple[float, ...] | None = None
        self._folder = SafetensorsFolder(folder)
        self._stored_name: dict[str, str] = {}
        for stored in self._folder.tensors:
            if not _NOT_TEXT.match(stored):
                self._stored_name[_text_name(stored)] = stored
        self._scheme, self._modules, self._parts = _find_quantized(config, self._folder, self._stored_name)
        self.quantization = None if self._scheme is None else self._scheme.name
        self._adds_one_to_norms = str(config.get("model_type")).startswith("gemma3") or any(
            str(name).startswith("Gemma3") for name in config.get("architectures") or ()
        )
        self.raw_tensor_shapes: Shapes = {name: info.shape for name, info in self._folder.tensors.items()}
        self.tensor_shapes: Shapes = {
            **{name: self.raw_tensor_shapes[stored] for name, stored in self._stored_name.items()},
            **{name: module.shape for name, module in self._modules.items()},
        }
        self.weights_bytes = sum(self.num_bytes(name) for name in self.tensor_shapes)
        self.reordered = next((name for name in self._modules if self._has_order(name)), None)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.tensor_shapes)

    def num_bytes(self, name: str) -> int:
        return sum(self._folder.tensors[stored].num_bytes for stored in self._stored_names(name))

    def has_half_scales(self, name: str) -> bool:
        return False

    def read(self, name: str, exact_float: bool = False) -> WeightData:
        if name in self._modules:
            assert self._scheme is not None
            codes = self._scheme.decode(self._modules[name], self._part_reader(name))
            return codes.dequantize() if exact_float else codes.to_groups()
        data = self._folder.read(self._stored_name[name])
        if self._adds_one_to_norms and name.endswith("norm.weight"):
            assert not isinstance(data, GroupQuantized)
            values = data.to_float32() if isinstance(data, BFloat16) else data.astype(np.float32)
            return values + np.float32(1)
        return data

    def release(self, names: Iterable[str]) -> None:
        self._folder.release(stored for name in names for stored in self._stored_names(name))

    def _stored_names(self, name: str) -> Iterable[str]:
        return self._parts[name].values() if name in self._modules else (self._stored_name[name],)

    def _part_reader(self, name: str) -> ReadPart:
        return lambda part: self._folder.read_part(self._parts[name][part])

    def _has_order(self, name: str) -> bool:
        assert self._scheme is not None
        if not self._scheme.may_reorder:
            return False
        return self._scheme.find_order(self._modules[name], self._part_reader(name)) is not None


def _find_quantized(
    config: dict[str, Any], folder: SafetensorsFolder, stored_name: dict[str, str]
) -> tuple[QuantScheme | None, dict[str, StoredModule], dict[str, dict[str, str]]]:
    """The scheme of a config.json; the weights that are stored in codes, by their canonical name; and of each, the
    tensors in the file by their part.

    Takes the tensors that belong to them out of stored_name (canonical -> in the file).
    """
    text_config = config.get("text_config")
    quantization_config = config.get("quantization_config")
    if not quantization_config and isinstance(text_config, dict):
        quantization_config = text_config.get("quantization_config")
    if not quantization_config:
        return None, {}, {}
    scheme = scheme_from_config(quantization_config)
    candidates: dict[str, dict[str, str]] = {}
    for name, stored in stored_name.items():
        module_name, _, part = name.rpartition(".")
        if part in scheme.parts:
            candidates.setdefault(module_name, {})[part] = stored
    modules: dict[str, StoredModule] = {}
    stored_parts: dict[str, dict[str, str]] = {}
    for module_name, parts in candidates.items():
        module = scheme.describe_module(module_name, {part: folder.tensors[parts[part]].shape for part in parts})
        if module is None:
            continue
        for part in parts:
            del stored_name[f"{module_name}.{part}"]
        modules[f"{module_name}.weight"] = module
        stored_parts[f"{module_name}.weight"] = parts
    return scheme, modules, stored_parts


def _text_name(stored: str) -> str:
    for prefix, replacement in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelSourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path}: is not a JSON object")
    return content


# --- GGUF -----------------------------------------------------------------------------------------------------

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_TOP_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)")


# The K types have a scale of scales, whose products are no halves.
_HALF_SCALED_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})


class GGUFCheckpoint:
    """A GGUF file. A tensor whose name we do not know keeps it, so that the completeness check can report it."""

    format = "gguf"

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        self.hf_config: dict[str, Any] | None = None
        self.generation_config: dict[str, Any] | None = None
        self.gguf_metadata: dict[str, Any] | None = self._file.metadata
        self._architecture = self._file.metadata.get("general.architecture")
        if self._file.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModelError(
                f"{path}: is one of {self._file.metadata['split.count']} parts of a model; join them into one file "
                "(llama.cpp's llama-gguf-split --merge does it)"
            )
        self.raw_tensor_shapes: Shapes = {name: info.shape for name, info in self._file.tensors.items()}
        self.rope_divisors = self._read_rope_divisors()
        self._stored_name: dict[str, str] = {}
        for stored in self._file.tensors:
            name = self._canonical_name(stored)
            if name in self._stored_name:
                raise CorruptFileError(f"{path}: {stored!r} and {self._stored_name[name]!r} are the same parameter")
            if stored != _ROPE_DIVISORS:
                self._stored_name[name] = stored
        self.tensor_shapes: Shapes = {
            name: self.raw_tensor_shapes[stored] for name, stored in self._stored_name.items()
        }
        self.weights_bytes = self._file.weights_bytes
        has_codes = any(len(info.shape) == 2 and info.type not in FLOAT_TYPES for info in self._file.tensors.values())
        self.quantization = "gguf" if has_codes else None
        self.reordered: str | None = None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.tensor_shapes)

    def num_bytes(self, name: str) -> int:
        return self._file.tensors[self._stored_name[name]].num_bytes

    def has_half_scales(self, name: str) -> bool:
        return self._file.tensors[self._stored_name[name]].type in _HALF_SCALED_TYPES

    def read(self, name: str, exact_float: bool = False) -> WeightData:
        data = self._file.read(self._stored_name[name], exact_float)
        if self._architecture == "llama" and (match := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
            key = "llama.attention.head_count" if match[1] == "q" else "llama.attention.head_count_kv"
            return unpair_rows(data, self._num_heads(key), f"{self.path}: tensor {self._stored_name[name]!r}")
        return data

    def release(self, names: Iterable[str]) -> None:
        self._file.release()

    def _num_heads(self, key: str) -> int:
        metadata = self._file.metadata
        num_heads = metadata.get(key, metadata.get("llama.attention.head_count"))
        if not isinstance(num_heads, int) or num_heads < 1:
            raise CorruptFileError(f"{self.path}: {key} is {num_heads!r}, not a positive whole number")
        return num_heads

    def _canonical_name(self, stored: str) -> str:
        layer_names = _GEMMA3_LAYER_NAMES if self._architecture == "gemma3" else _LAYER_NAMES
        if (match := _LAYER_TENSOR.fullmatch(stored)) and match[2] in layer_names:
            return f"model.layers.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"
        if (match := _TOP_TENSOR.fullmatch(stored)) and match[1] in _TOP_NAMES:
            return f"{_TOP_NAMES[match[1]]}.{match[2]}"
        return stored

    def _read_rope_divisors(self) -> tuple[float, ...] | None:
        if _ROPE_DIVISORS not in self._file.tensors:
            return None
        values = self._file.read(_ROPE_DIVISORS, exact_float=True)
        assert isinstance(values, np.ndarray)
        return tuple(values.ravel().tolist())


def unpair_rows(data: WeightData, num_heads: int, what: str) -> WeightData:
    """Rows (or numbers) of q or k from GGUF's order to Hugging Face's. In each head, with half = head_dim / 2:

    GGUF:          0, half, 1, half + 1, 2, half + 2, ...
    Hugging Face:  0, 1, 2, ...
    """
    num_rows = data.shape[0]
    if num_rows % (2 * num_heads):
        raise CorruptFileError(f"{what} has {num_rows} rows, which {num_heads} heads of an even size cannot share")
    order = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    if isinstance(data, GroupQuantized):
        minimum = None if data.minimum is None else data.minimum[order]
        return GroupQuantized(data.codes[order], data.scale[order], minimum, data.bits)
    if isinstance(data, BFloat16):
        return BFloat16(data.bits[order])
    return data[order]
