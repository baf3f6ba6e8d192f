"""Reads a PEFT checkpoint: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import CorruptFileError, IncompleteWeightsError, ModelSourceError, UnsupportedModelError
from octavo.lora.adapter import (
    PARENT_OF,
    Adapter,
    AdapterBuilder,
    Module,
    describe_module,
    list_some,
    pair_up,
)
from octavo.models.config import ModelConfig
from octavo.ops.interface import GroupQuantized
from octavo.weights.safetensors import SafetensorsFile

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model\.|model\.language_model\.|language_model\.model\.)?"
    r"layers\.(?P<layer>\d{1,5})\.(?P<parent>self_attn|mlp)\.(?P<name>\w+))\.lora_(?P<half>[AB])(?:\.default)?\.weight"
)
# Settings of LoraConfig that change what is computed, and what they are.
_VARIANTS = {
    "use_dora": "DoRA (use_dora), whose weights are scaled by learned magnitudes",
    "modules_to_save": "modules_to_save, whole modules that were trained beside the adapter",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "target_parameters": "target_parameters, adapters on bare parameters",
    "lora_bias": "biases (lora_bias)",
    "layer_replication": "layer_replication, which repeats layers of the base model",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens), which begins in mid-prompt",
    "use_qalora": "QALoRA (use_qalora), which pools its inputs",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "fan_in_fan_out": "fan_in_fan_out, for weights that are stored transposed",
    "kasa_config": "KaSA (kasa_config)",
    "arrow_config": "arrow routing (arrow_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
}
# Initializations that take a part out of the base model's weights, which ours still have.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_peft(folder: Path, config: ModelConfig, max_rank: int) -> Adapter:
    """Raises ModelSourceError, CorruptFileError, IncompleteWeightsError, UnsupportedModelError."""
    settings = _read_settings(folder / CONFIG_FILE)
    _refuse_variants(folder, settings)
    weights_path = folder / WEIGHTS_FILE
    if not weights_path.exists():
        pickled = " (adapter_model.bin is a pickle, which can run code when read)" if any(folder.glob("*.bin")) else ""
        raise ModelSourceError(f"{folder}: has no {WEIGHTS_FILE}{pickled}; save the adapter with safetensors")
    file = SafetensorsFile(weights_path)
    halves: dict[Module, dict[str, str]] = {}
    names: dict[Module, str] = {}  # as PEFT matches its patterns with
    for tensor in file.tensors:
        match = _TENSOR.fullmatch(tensor)
        if match is None or PARENT_OF.get(match["name"]) != match["parent"]:
            _refuse_tensor(folder, tensor)
        module = int(match["layer"]), match["name"]
        halves.setdefault(module, {})[match["half"].lower()] = tensor
        names[module] = match["module"]
    pair_up(weights_path, halves)
    builder = AdapterBuilder(weights_path, config, max_rank)
    for module, tensors in halves.items():
        down, up = file.read(tensors["a"]), file.read(tensors["b"])
        assert not isinstance(down, GroupQuantized), "safetensors has no codes"
        assert not isinstance(up, GroupQuantized), "safetensors has no codes"
        rank, scale = _find_scale(folder, settings, names[module])
        if down.shape[:1] != (rank,):
            raise CorruptFileError(
                f"{weights_path}: lora_A of {describe_module(module)} has {list(down.shape)}, but {CONFIG_FILE} says "
                f"rank {rank}; the two files do not belong together"
            )
        builder.add(module, down, up, scale)
    _check_complete(weights_path, settings, config, builder.modules)
    base = settings.get("base_model_name_or_path")
    return builder.build(base if isinstance(base, str) else "")


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelSourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise CorruptFileError(f"{path}: is not a JSON object")
    return settings


def _refuse_variants(folder: Path, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{folder}: is a PEFT adapter of type {kind}; LORA is what can be served")
    for setting, what in _VARIANTS.items():
        if settings.get(setting):
            raise UnsupportedModelError(f"{folder}: uses {what}; this is not supported")
    if settings.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{folder}: has trained biases (bias={settings['bias']!r}); this is not supported")
    begin = settings.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGED_BASES):
        raise UnsupportedModelError(
            f"{folder}: was begun with init_lora_weights={begin!r}, which changes the base model's weights; save it "
            "with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )


def _refuse_tensor(folder: Path, tensor: str) -> NoReturn:
    """Raises UnsupportedModelError, which names what the tensor is."""
    module = tensor.removeprefix("base_model.model.")
    if "lora_magnitude_vector" in tensor:
        what = f"DoRA (the tensor {tensor})"
    elif "lora_embedding" in tensor or re.search(r"(^|\.)(embed_tokens|lm_head)\.lora_", tensor):
        what = f"an adapter on the embeddings or the output head (the tensor {tensor})"
    elif tensor.endswith(".bias"):
        what = f"biases (the tensor {tensor})"
    elif ".lora_" not in tensor:
        what = f"a whole module that was trained beside the adapter, of modules_to_save (the tensor {tensor})"
    else:
        raise UnsupportedModelError(
            f"{folder}: adds to {module.split('.lora_')[0]}, which is not one of the projections that can be adapted: "
            f"{', '.join(PARENT_OF)} of the layers"
        )
    raise UnsupportedModelError(f"{folder}: has {what}; this is not supported")


def _find_scale(folder: Path, settings: Mapping[str, Any], name: str) -> tuple[int, float]:
    """(rank, scale) of a module by its full name, as PEFT finds them: lora_alpha / r, or / sqrt(r) with rsLoRA."""
    rank = _find_pattern(settings.get("rank_pattern"), name, settings.get("r"))
    alpha = _find_pattern(settings.get("alpha_pattern"), name, settings.get("lora_alpha"))
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CorruptFileError(f"{folder / CONFIG_FILE}: the rank of {name} is {rank!r}, not a positive whole number")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise CorruptFileError(f"{folder / CONFIG_FILE}: lora_alpha of {name} is {alpha!r}, not a number")
    return rank, alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _find_pattern(patterns: Any, name: str, default: Any) -> Any:
    """The value of the first pattern that the end of the name matches, at a dot."""
    if not isinstance(patterns, dict):
        return default
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error:
            continue
    return default


def _check_complete(path: Path, settings: Mapping[str, Any], config: ModelConfig, found: Iterable[Module]) -> None:
    """What the settings name plainly must all be there; patterns are taken at the file's word."""
    targets = settings.get("target_modules")
    if not isinstance(targets, list) or settings.get("exclude_modules"):
        return
    layers = settings.get("layers_to_transform")
    wanted = [layers] if isinstance(layers, int) else layers if isinstance(layers, list) else range(config.num_layers)
    present = set(found)
    missing = [
        describe_module((layer, name))
        for layer in wanted
        for name in targets
        if name in PARENT_OF and (layer, name) not in present
    ]
    if missing:
        raise IncompleteWeightsError(
            f"{path}: {CONFIG_FILE} names {list_some(missing)}, but the file has no matrices for "
            f"{'it' if len(missing) == 1 else 'them'}; the file is incomplete, or made for another base model"
        )
