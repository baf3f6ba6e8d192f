"""What people from other servers type is answered by name, and the table of it stays true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from octavo import LLM, EngineArgs, SamplingParams
from octavo.cli.arguments import prepare_arguments, read_options
from octavo.cli.main import app
from octavo.errors import ConfigError, InvalidRequestError
from octavo.foreign_options import FOREIGN_COMMANDS, FOREIGN_OPTIONS

COMMAND: Any = typer.main.get_command(app)
SERVE = read_options(COMMAND.commands["serve"].params)
ALL_COMMANDS = [*COMMAND.commands.values(), *COMMAND.commands["bench"].commands.values()]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare_arguments(COMMAND, list(arguments))
    return caught.value.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "m", "--enable-log-requests"], "here it is --access-log."),
        (["serve", "m", "--enable-log-requests=true"], "here it is --access-log."),
        (["serve", "m", "--disable-log-requests"], "leave it out: nothing is logged"),
        (["serve", "m", "--max-logprobs", "50"], "up to 20"),
        (["serve", "m", "--tokenizer", "t"], "tokenizer comes from the model"),
        (["serve", "m", "--load-format", "safetensors"], "read from the files"),
        (["serve", "m", "--download-dir=/x"], "HF_HOME"),
        (["serve", "m", "--enable-lora"], "adapters are not there yet"),
        (["serve", "m", "--swap-space", "4"], "computed again"),
        (["serve", "m", "-ngl", "99"], "no GPU backend"),
        (["serve", "m", "-ngl=99"], "no GPU backend"),
        (["serve", "m", "--n_gpu_layers", "99"], "no GPU backend"),
        (["serve", "m", "-c", "4096"], "here it is --max-model-len 4096."),
        (["serve", "m", "--ctx-size=4096"], "here it is --max-model-len 4096."),
        (["serve", "m", "-np", "4"], "here it is --max-num-seqs 4."),
        (["serve", "m", "--jinja"], "always on"),
        (["serve", "m", "--temp", "0.1"], "a field of each request, temperature"),
        (["serve", "m", "--compilation-config.level", "3"], "captures no graphs"),
        (["serve", "m", "-ctk", "q8_0"], "here it is --kv-cache-dtype."),
        (["generate", "x", "--temp", "0.1"], "here it is --temperature 0.1."),
        (["generate", "-n", "5", "x"], "here it is --max-tokens 5."),
        (["chat", "-c", "4096"], "here it is --max-model-len 4096."),
        (["chat", "-np", "4"], "it is --max-num-seqs of `octavo serve`"),
        (["bench", "serve", "--num-prompts", "8"], "here it is --num-requests 8."),
        (["bench", "serve", "--request-rate=3"], "here it is --rate 3."),
        (["serve", "--max_num_seq", "5"], "did you mean --max-num-seqs?"),
        (["serve", "--disable-access-log"], "here it is --no-access-log."),
        (["serve", "--disable-chunked-prefill"], "here it is --no-enable-chunked-prefill."),
        (["serve", "--no-chunked-prefill"], "here it is --no-enable-chunked-prefill."),
        (["serve", "--no-trust-remote-code"], "that is how it is without --trust-remote-code."),
        (["serve", "--no-enable-lora"], "there is no --enable-lora here"),
        (["serve", "--no_enable_sleep_mode"], "there is no --enable-sleep-mode here"),
        (["serve", "--zap"], "There is no option --zap. `octavo serve --help`"),
        (["serve", "-z"], "There is no option -z."),
        (["run", "m"], "octavo chat MODEL"),
        (["bench", "latency"], "octavo bench step"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_foreign_option_is_answered_with_ours_or_with_why_not(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


def test_all_foreign_options_of_a_line_are_answered_at_once() -> None:
    message = refusal("serve", "m", "-c", "4096", "--port", "9", "--jinja", "-ngl", "99")
    lines = message.splitlines()
    assert lines[0] == "3 options are not known here; `octavo serve --help` lists all options."
    assert [line.split(":")[0] for line in lines[1:]] == [
        f"  There is no option {flag}" for flag in ("-c", "--jinja", "-ngl")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "-m", "M", "--seed", "-5"],
        ["serve", "-qint8", "M"],
        ["serve", "-q", "int8"],
        ["serve", "-tp", "1", "--no-enforce-eager"],
        ["generate", "--", "-c"],
        ["generate", "-"],
        ["chat", "--system", "-c"],
    ],
    ids=" ".join,
)
def test_what_is_ours_or_a_value_is_let_through(arguments: list[str]) -> None:
    assert prepare_arguments(COMMAND, arguments) == arguments


def test_no_option_of_octavo_serve_is_in_the_table() -> None:
    assert [option for option in FOREIGN_OPTIONS if set(option.flags) & set(SERVE)] == []


def test_what_the_table_names_exists() -> None:
    all_flags = {flag for command in ALL_COMMANDS for flag in read_options(command.params)}
    for option in FOREIGN_OPTIONS:
        if option.ours is not None:
            assert option.ours in all_flags, option
            assert option.ours in SERVE or option.why, f"say why {option.ours} is not an option of octavo serve"
        else:
            assert option.why
        assert not option.why.endswith(".")


def test_no_flag_is_in_the_table_twice_with_different_answers() -> None:
    flags = [flag for option in FOREIGN_OPTIONS for flag in option.flags]
    assert sorted(flags) == sorted(set(flags))


def test_no_command_of_ours_is_in_the_table() -> None:
    assert not set(FOREIGN_COMMANDS) & {command.name for command in ALL_COMMANDS}


def test_a_file_from_elsewhere_is_answered_likewise(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    for text, words in (
        ("enable_log_requests: true", "there is no option enable_log_requests; here it is access-log."),
        ("ctx-size: 4096", "there is no option ctx-size; here it is max-model-len."),
        ("swap_space: 4", "computed again"),
        ("max_model_length: 5", "did you mean max-model-len?"),
    ):
        path.write_text(text)
        assert words in refusal("serve", "--config", str(path))


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("max_model_length", "did you mean max_model_len?"),
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization?"),
        ("n_ctx", "here it is max_model_len."),
        ("n_gpu_layers", "no GPU backend"),
        ("fully_sharded_loras", "adapters are not there yet"),
        ("zap", "Known are block_size"),
    ],
)
def test_an_unknown_argument_of_llm_is_answered(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("m", **{argument: 1})  # type: ignore[arg-type]
    assert argument in caught.value.message
    assert words in caught.value.message


def test_an_unknown_argument_of_engine_args_is_answered_likewise() -> None:
    with pytest.raises(ConfigError, match=r"EngineArgs has no option 'n_ctx': here it is max_model_len\. Known are "):
        EngineArgs(n_ctx=5)  # type: ignore[call-arg]


def test_a_tokenizer_of_its_own_is_refused_clearly() -> None:
    with pytest.raises(ConfigError, match="tokenizer is 'gpt2', but the tokenizer comes from the model"):
        LLM("m", tokenizer="gpt2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("max_new_tokens", "did you mean max_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("repeat_penalty", "did you mean repetition_penalty?"),
        ("xyzzy", "known are n, temperature"),
    ],
)
def test_an_unknown_field_of_sampling_params_is_answered(field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: 1})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert words in caught.value.message
