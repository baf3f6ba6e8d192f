"""Reads a LoRA adapter from a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.lora.adapter import Adapter, AdapterBuilder, FloatArray, Module, pair_up
from octavo.models.config import ModelConfig
from octavo.ops.interface import GroupQuantized
from octavo.weights.checkpoint import unpair_rows
from octavo.weights.gguf import GGUFFile

_NAMES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_qkv": "qkv_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_TENSOR = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<name>[a-z_]+)\.weight\.lora_(?P<half>[ab])")
# Models whose GGUF files have the rows of q and k in pairs.
_PAIRED_ARCHITECTURES = ("llama",)


def read_gguf(path: Path, config: ModelConfig, max_rank: int) -> Adapter:
    """Raises ModelSourceError, CorruptFileError, IncompleteWeightsError, UnsupportedModelError."""
    file = GGUFFile(path)
    metadata = file.metadata
    kinds = metadata.get("general.type"), metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise UnsupportedModelError(
            f"{path}: is no LoRA adapter: general.type is {kinds[0]!r}, adapter.type {kinds[1]!r}, and not 'adapter' "
            "and 'lora'"
        )
    if metadata.get("adapter.alora.invocation_tokens"):
        raise UnsupportedModelError(f"{path}: uses activated LoRA, which begins in mid-prompt; this is not supported")
    architecture = metadata.get("general.architecture")
    known = {"mistral": "llama"}.get(config.architecture, config.architecture)
    if architecture != known:
        raise UnsupportedModelError(
            f"{path}: was made for a model of the architecture {architecture!r}, but this one is {known!r}"
        )
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise CorruptFileError(f"{path}: adapter.lora.alpha is {alpha!r}, not a number")
    halves: dict[Module, dict[str, str]] = {}
    for tensor in file.tensors:
        match = _TENSOR.fullmatch(tensor)
        if match is None or match["name"] not in _NAMES:
            raise UnsupportedModelError(
                f"{path}: has the tensor {tensor}, which is not of a projection that can be adapted: "
                f"{', '.join(_NAMES)} of the layers; embeddings, norms and biases are not supported"
            )
        halves.setdefault((int(match["layer"]), _NAMES[match["name"]]), {})[match["half"]] = tensor
    pair_up(path, halves)
    builder = AdapterBuilder(path, config, max_rank)
    for module, tensors in halves.items():
        down, up = _read(file, tensors["a"]), _read(file, tensors["b"])
        if architecture in _PAIRED_ARCHITECTURES and module[1] in ("q_proj", "k_proj"):
            num_heads = config.num_heads if module[1] == "q_proj" else config.num_kv_heads
            unpaired = unpair_rows(up, num_heads, f"{path}: tensor {tensors['b']!r}")
            assert not isinstance(unpaired, GroupQuantized), "read as floats"
            up = unpaired
        # llama.cpp's rule: without alpha the product is added as it is.
        rank = down.shape[0]
        builder.add(module, down, up, alpha / rank if alpha and rank else 1.0)
    base = metadata.get("general.base_model.0.name", "")
    return builder.build(base if isinstance(base, str) else "")


def _read(file: GGUFFile, name: str) -> FloatArray:
    values = file.read(name, exact_float=True)
    assert not isinstance(values, GroupQuantized), "read as floats"
    return values
