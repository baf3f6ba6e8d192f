"""GPTQ, AWQ and compressed-tensors: codes exactly as the formats define them, and refusals by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.quant.schemes import scheme_from_config
from tests.weights.stored_weights import Format, awq, compressed_tensors, gptq

FORMATS: dict[str, Format] = {
    **{
        f"gptq {bits} bits, groups of {size}, {'sym' if symmetric else 'asym'}, v{version}": gptq(
            bits, size, symmetric, version=version
        )
        for bits, size, symmetric, version in (
            (4, 32, False, 1), (4, 64, True, 1), (4, 128, False, 2), (4, -1, False, 1),
            (8, 32, False, 1), (8, 128, True, 2), (8, -1, True, 1),
        )
    },
    **{f"awq, groups of {size}": awq(size) for size in (32, 64, 128, -1)},
    **{
        f"packed, {bits} bits, groups of {size}, {'sym' if symmetric else 'asym'}": compressed_tensors(
            bits, size, symmetric
        )
        for bits, size, symmetric in (
            (4, 32, True), (4, 128, False), (4, -1, True), (4, -1, False), (8, 64, True), (8, 32, False), (8, -1, False)
        )
    },
    **{
        f"int8, groups of {size}, {'sym' if symmetric else 'asym'}":
            compressed_tensors(8, size, symmetric, packed=False)
        for size, symmetric in ((-1, True), (-1, False), (64, True), (64, False))
    },
    "int4 as int8": compressed_tensors(4, 32, False, packed=False),
}  # fmt: skip


def decode(stored: Format, num_rows: int = 24, num_columns: int = 192) -> tuple[Any, np.ndarray]:
    """The codes as read, and the values that they stand for."""
    tensors, values = stored.make(np.random.default_rng(1), num_rows, num_columns)
    scheme = scheme_from_config(stored.config)
    module = scheme.describe_module("m", {part: tensor.shape for part, tensor in tensors.items()})
    assert module is not None
    assert module.shape == (num_rows, num_columns)

    def read(part: str) -> np.ndarray:
        tensor = tensors[part]
        return tensor.astype(np.float32) if tensor.dtype.kind == "f" else tensor

    return scheme.decode(module, read), values


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_32_hold_the_very_numbers_of_the_format(name: str) -> None:
    codes, values = decode(FORMATS[name])
    groups = codes.to_groups()
    np.testing.assert_array_equal(groups.dequantize(), values)
    np.testing.assert_array_equal(codes.dequantize(), values)
    assert groups.codes.dtype == (np.uint8 if groups.bits == 4 else np.int8)
    assert groups.codes.flags.c_contiguous
    assert groups.scale.dtype == np.float32
    assert groups.scale.shape == (24, 6)


def test_symmetric_codes_of_8_bits_need_no_minimum() -> None:
    assert decode(compressed_tensors(8, -1, True))[0].to_groups().minimum is None


@pytest.mark.parametrize("stored", [gptq(desc_act=True), compressed_tensors(actorder="group")])
def test_activation_order_gives_exact_floats(stored: Format) -> None:
    codes, values = decode(stored)
    assert codes.order is not None
    np.testing.assert_array_equal(codes.dequantize(), values)


def test_desc_act_with_groups_that_follow_one_another_is_no_activation_order() -> None:
    stored = gptq()
    codes, values = decode(Format({**stored.config, "desc_act": True}, stored.make))
    np.testing.assert_array_equal(codes.to_groups().dequantize(), values)


def test_a_gptq_zero_point_of_0_survives_being_stored_less_one() -> None:
    """0 - 1 borrows from the next field of the word; adding the 1 back to the whole word undoes it."""
    scheme = scheme_from_config(gptq().config)
    zero = np.array([0, 3, 0, 15, 1, 0, 0, 8], np.uint64)
    word = sum(int(number) << (4 * field) for field, number in enumerate(zero))
    stored = np.array([[(word - 0x11111111) % 2**32]], np.uint32).view(np.int32)
    tensors = {
        "qweight": np.zeros((4, 8), np.int32),
        "qzeros": stored,
        "scales": np.ones((1, 8), np.float32),
    }
    module = scheme.describe_module("m", {part: tensor.shape for part, tensor in tensors.items()})
    assert module is not None
    codes = scheme.decode(module, tensors.__getitem__)
    np.testing.assert_array_equal(np.asarray(codes.zero)[:, 0], zero)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8"}, "'fp8', which Octavo does not support; gptq, awq, compressed-tensors"),
    ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ({"load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "auto-round"}, "auto-round"),
    ({**gptq().config, "bits": 3}, "gptq with 3 bits"),
    ({**gptq().config, "bits": True}, "gptq with True bits"),
    ({**gptq().config, "group_size": 16}, "gptq with group_size 16"),
    ({**gptq().config, "checkpoint_format": "marlin"}, "gptq format 'marlin'"),
    ({**gptq().config, "is_marlin_format": True}, "is_marlin_format"),
    ({**gptq().config, "dynamic": {r"+:.*\.18\..*": {"bits": 8}}}, "settings of its own"),
    ({**awq().config, "version": "gemv"}, "awq version 'gemv'"),
    ({**awq().config, "bits": 8}, "awq with 8 bits"),
    ({**awq().config, "zero_point": False}, "awq without zero_point"),
    (compressed_tensors(format="float-quantized").config, "format 'float-quantized'"),
    (compressed_tensors(format="nvfp4-pack-quantized").config, "nvfp4"),
    (compressed_tensors(bits=2).config, "compressed-tensors with 2 bits"),
    (compressed_tensors(weights={"num_bits": 8, "type": "float", "strategy": "channel"}).config, "type 'float'"),
    (compressed_tensors(weights={"num_bits": 8, "strategy": "tensor"}).config, "strategy 'tensor'"),
    (compressed_tensors(weights=None).config, "quantizes no weights"),
    (compressed_tensors(input_activations={"type": "float", "dynamic": True}).config, "input_activations"),
    (compressed_tensors(input_activations={"type": "int", "dynamic": False}).config, "input_activations"),
    (compressed_tensors(output_activations={"type": "int"}).config, "output_activations"),
    ({**compressed_tensors().config, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({**compressed_tensors().config, "transform_config": {"config_groups": {}}}, "transform_config"),
    ({**compressed_tensors().config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        scheme_from_config(config)


def test_activations_in_dynamic_8_bits_are_no_obstacle() -> None:
    scheme_from_config(compressed_tensors(input_activations={"type": "int", "dynamic": True, "num_bits": 8}).config)


@pytest.mark.parametrize("config", ["gptq", ["gptq"], {**compressed_tensors().config, "config_groups": {}}])
def test_a_config_that_makes_no_sense_is_corrupt(config: Any) -> None:
    with pytest.raises(CorruptFileError, match="quantization_config"):
        scheme_from_config(config)


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("scales", (3, 16), r"m\.scales has the shape \[3, 16\], but \[2, 16\]"),
        ("qzeros", None, r"m\.qzeros is missing"),
        ("qweight", (8,), "is no matrix"),
        ("g_idx", (4,), r"m\.g_idx has the shape"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(part: str, shape: tuple[int, ...] | None, message: str) -> None:
    shapes: dict[str, Any] = {"qweight": (8, 16), "qzeros": (2, 2), "scales": (2, 16), "g_idx": (64,), part: shape}
    with pytest.raises(CorruptFileError, match=message):
        scheme_from_config(gptq().config).describe_module("m", {key: shapes[key] for key in shapes if shapes[key]})


def test_a_module_that_stayed_a_float_is_left_alone() -> None:
    scheme = scheme_from_config(compressed_tensors().config)
    assert scheme.describe_module("lm_head", {"weight": (10, 32)}) is None


def test_targets_choose_the_group_of_a_module() -> None:
    config = compressed_tensors(4, 32, targets=[r"re:.*self_attn.*"]).config
    other = compressed_tensors(8, 32, targets=["mlp.up_proj"]).config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = other
    scheme = scheme_from_config(config)

    def bits_of(name: str, words: int) -> int:
        parts = {"weight_packed": (8, words), "weight_scale": (8, 2), "weight_shape": (2,)}
        module = scheme.describe_module(name, parts)
        assert module is not None
        return module.bits

    assert bits_of("model.layers.0.self_attn.q_proj", 8) == 4
    assert bits_of("model.layers.0.mlp.up_proj", 16) == 8
    with pytest.raises(CorruptFileError, match="no entry of config_groups"):
        bits_of("model.layers.0.mlp.down_proj", 8)
