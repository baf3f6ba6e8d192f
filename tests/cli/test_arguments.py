"""What was typed, and what a file says, made into what the parser takes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from octavo.cli.main import app
from octavo.cli.quantities import parse_quantity
from octavo.config import EngineArgs
from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings

COMMAND = typer.main.get_command(app)


def test_nothing_typed_means_choose_for_me(parse: Any) -> None:
    assert parse() == (EngineArgs(), ServerSettings())


def test_every_flag_of_the_engine(parse: Any) -> None:
    engine_args, settings = parse(
        *shlex.split(
            "M --served-model-name a --max-model-len 8k --gpu-memory-utilization 0.3 --kv-cache-memory-bytes 2GiB "
            "--kv-cache-dtype float32 --block-size 32 --max-num-batched-tokens 256 --max-num-seqs 8 "
            "--no-enable-chunked-prefill --no-enable-prefix-caching --enforce-eager -tp 1 --dtype float32 "
            "--seed 7 --threads 3 --device cpu --trust-remote-code --revision abc --scheduling-policy priority"
        )
    )
    assert engine_args == EngineArgs(
        model="M",
        served_model_name=("a",),
        max_model_len=8000,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=2 * 2**30,
        kv_cache_dtype="float32",
        block_size=32,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        tensor_parallel_size=1,
        dtype="float32",
        seed=7,
        threads=3,
        device="cpu",
        trust_remote_code=True,
        revision="abc",
        scheduling_policy="priority",
    )
    assert settings == ServerSettings()


def test_every_flag_of_the_server(parse: Any) -> None:
    _, settings = parse(
        *shlex.split(
            "--host 0.0.0.0 --port 9 --api-key a --api-key b --max-request-bytes 1M --shutdown-timeout 2 --access-log"
        )
    )
    assert settings == ServerSettings(
        host="0.0.0.0",
        port=9,
        api_keys=("a", "b"),
        max_request_bytes=2**20,
        shutdown_timeout_s=2.0,
        access_log=True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["M", "--max_model_len", "512"],
        ["M", "--max_model_len=512"],
        ["--model", "M", "--max-model-len=512"],
        ["--max-model-len", "512", "M"],
        ["--max-model-len", "512", "-m", "M"],
        ["--max-model-len", "512", "--", "M"],
    ],
    ids=" ".join,
)
def test_ways_to_say_the_same(parse: Any, arguments: list[str]) -> None:
    assert parse(*arguments)[0] == EngineArgs(model="M", max_model_len=512)


def test_names_in_a_row_are_all_names_when_the_model_came_first(parse: Any) -> None:
    assert parse("M", "--served-model-name", "a", "b", "--port", "9")[0].served_model_name == ("a", "b")


def test_a_model_is_never_taken_for_a_name(parse: Any) -> None:
    engine_args, _ = parse("--served-model-name", "a", "M")
    assert (engine_args.model, engine_args.served_model_name) == ("M", ("a",))


def test_two_models_are_refused(parse: Any) -> None:
    with pytest.raises(ConfigError, match=r"'A'.*'B'"):
        parse("A", "--model", "B")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--block-size", "7"], "--block-size"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--max-request-bytes", "1.5.5"], "--max-request-bytes"),
        (["--max-request-bytes", "0"], "--max-request-bytes"),
        (["--api-key", ""], "--api-key"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_a_wrong_value_names_its_option(parse: Any, arguments: list[str], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert caught.value.option == option


def test_keys_come_from_the_environment_unless_typed(parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert parse()[1].api_keys == ("v",)
    monkeypatch.setenv("OCTAVO_API_KEY", "o")
    assert parse()[1].api_keys == ("o",)
    assert parse("--api-key", "t")[1].api_keys == ("t",)
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    assert parse()[1].api_keys == ("v",)


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Any:
    path = tmp_path / "octavo.yaml"

    def write(text: str) -> list[str]:
        path.write_text(text, encoding="utf-8")
        return ["--config", str(path)]

    return write


def test_a_file_sets_what_was_not_typed(parse: Any, config: Any) -> None:
    file = config(
        "model: M\nport: 9\nmax_model_len: 512\nserved-model-name: [a, b]\nenable-prefix-caching: false\n"
        "enforce_eager: true\napi-key: '-k'\nthreads: null\naccess-log: false\n"
    )
    engine_args, settings = parse(*file)
    assert engine_args == EngineArgs(
        model="M",
        max_model_len=512,
        served_model_name=("a", "b"),
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    assert (settings.port, settings.api_keys, settings.access_log) == (9, ("-k",), False)


def test_what_is_typed_wins_and_lists_are_not_mixed(parse: Any, config: Any) -> None:
    file = config("model: M\nport: 9\nserved-model-name: [a, b]\nenable-prefix-caching: false\nblock-size: 32\n")
    engine_args, settings = parse(
        "OTHER", *file, "--port", "8", "--served-model-name=c", "--enable-prefix-caching", "--block_size=64"
    )
    assert engine_args == EngineArgs(model="OTHER", served_model_name=("c",), enable_prefix_caching=True, block_size=64)
    assert settings.port == 8


def test_an_empty_file_sets_nothing(parse: Any, config: Any) -> None:
    assert parse(*config("# nothing\n")) == (EngineArgs(), ServerSettings())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 9", ["prot", "did you mean port?"]),
        ("xyzzy: 9", ["xyzzy", "--help"]),
        ("config: other.yaml", ["config"]),
        ("port: [1, 2]", ["port", "one value"]),
        ("port: {a: 1}", ["port"]),
        ("port: true", ["port", "True"]),
        ("enforce-eager: 1", ["enforce-eager", "true or false"]),
        ("no-enable-prefix-caching: x", ["true or false"]),
        ("block-size: 8\nblock_size: 16", ["block-size", "block_size", "same option"]),
        ("- port", ["list"]),
        ("port: [", ["YAML", "line"]),
        ("a: b: c", ["YAML", "line 1"]),
    ],
)
def test_a_bad_file_is_refused_with_its_path(parse: Any, config: Any, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*config(text))
    assert "octavo.yaml" in caught.value.message
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_missing_file_is_refused(parse: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read: No such file"):
        parse("--config", str(tmp_path / "nothing.yaml"))


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5g", 1_500_000_000),
        ("2GiB", 2**31),
        ("512MiB", 2**29),
        ("16_384", 16384),
        ("2GB", 2**31),
        ("0", 0),
    ],
)
def test_numbers_as_people_write_them(text: str, number: int) -> None:
    assert parse_quantity("--x", text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "8kk", "0.0001k", "eight", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--x is"):
        parse_quantity("--x", text)
