"""`octavo chat`: a conversation in the terminal.

With stdin from a pipe, each line is a turn and only the answers are printed.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import model_options as options
from octavo.cli.model_options import MaybeInt, MaybeStr
from octavo.cli.quantities import parse_quantity
from octavo.cli.sampling_options import MinPOption, RequestSeedOption, TemperatureOption, TopKOption, TopPOption
from octavo.errors import ClientError, ServerError

if TYPE_CHECKING:
    from octavo.cli.session import Session
    from octavo.core.sampling_params import SamplingParams

_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


def chat(
    system: Annotated[
        MaybeStr, typer.Option(metavar="TEXT", help="A system message before the conversation.", show_default=False)
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
    from octavo.cli.session import make_engine_args, run_session
    from octavo.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=request_seed
    )
    engine_args = make_engine_args(
        model=model,
        max_model_len=parse_quantity("--max-model-len", max_model_len),
        dtype=dtype,
        quantization=quantization,
        revision=revision,
        trust_remote_code=trust_remote_code,
        kv_cache_memory_bytes=parse_quantity("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        threads=threads,
    )

    async def talk(session: Session) -> int:
        return await converse(session, params, system, is_interactive=sys.stdin.isatty())

    raise typer.Exit(run_session(engine_args, talk))


async def converse(session: Session, params: SamplingParams, system: str | None, *, is_interactive: bool) -> int:
    """Turns until /exit or the end of the input. A turn that fails is told and taken back; the conversation goes on."""
    import asyncio

    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    num_failures = 0
    if is_interactive:
        _enable_line_editing()
        sys.stdout.write(f"{session.model}: {_HELP}\n")
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
            sys.stdout.write(f"There is no {line.split()[0]}; {_HELP}\n")
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = await _answer(session, messages, params)
        except (ClientError, ServerError) as error:
            messages.pop()
            num_failures += 1
            sys.stderr.write(f"octavo: {error.message}" + (" /reset starts afresh.\n" if is_interactive else "\n"))
            sys.stderr.flush()
        else:
            messages.append({"role": "assistant", "content": answer})
    return 1 if num_failures and not is_interactive else 0


async def _answer(session: Session, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Print the answer as it comes. Ctrl-C ends it; what was said until then stays part of the conversation."""
    import asyncio
    import signal

    pieces: list[str] = []

    async def write() -> None:
        async for piece in session.stream(session.encode_messages(messages), params):
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
