"""Which scheme a config.json's quantization_config asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.quant.awq import AWQScheme
from octavo.quant.compressed_tensors import CompressedTensorsScheme
from octavo.quant.gptq import GPTQScheme
from octavo.quant.stored import QuantScheme

_SCHEMES: dict[str, Callable[[Mapping[str, Any]], QuantScheme]] = {
    "gptq": GPTQScheme,
    "awq": AWQScheme,
    "compressed-tensors": CompressedTensorsScheme,
}
SCHEME_NAMES = tuple(_SCHEMES)


def scheme_from_config(quantization_config: Any) -> QuantScheme:
    """Raises UnsupportedModelError, with the name of what we cannot read, and CorruptFileError."""
    if not isinstance(quantization_config, Mapping):
        raise CorruptFileError(f"config.json: quantization_config is {quantization_config!r}, not an object")
    method = quantization_config.get("quant_method")
    # Older bitsandbytes files do not name their method.
    if method is None and (quantization_config.get("load_in_4bit") or quantization_config.get("load_in_8bit")):
        method = "bitsandbytes"
    if method not in _SCHEMES:
        raise UnsupportedModelError(
            f"config.json: the weights are quantized by {method!r}, which Octavo does not support; "
            f"{', '.join(SCHEME_NAMES)} and GGUF files can be read"
        )
    return _SCHEMES[method](quantization_config)
