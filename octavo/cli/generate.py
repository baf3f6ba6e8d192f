"""`octavo generate`: one prompt, the answer on stdout as it comes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli import model_options as options
from octavo.cli.model_options import MaybeStr
from octavo.cli.quantities import parse_quantity
from octavo.cli.sampling_options import (
    MinPOption,
    RequestSeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from octavo.errors import ConfigError

_DEFAULT_MAX_TOKENS = 128


def generate(
    prompt: Annotated[
        MaybeStr,
        typer.Argument(
            metavar="PROMPT", help="The text to go on with; - or nothing reads it from stdin.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate at most.")] = _DEFAULT_MAX_TOKENS,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    request_seed: RequestSeedOption = None,
    stop: StopOption = [],  # noqa: B006 - typer copies it
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Take the prompt as a user's message, through the chat template.")
    ] = False,
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
    """Go on with a text, and print what the model writes."""
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise ConfigError('The prompt is empty; type one: octavo generate "Once upon a time".')

    from octavo.cli.session import Session, make_engine_args, run_session
    from octavo.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=request_seed,
        stop=tuple(stop),
        ignore_eos=ignore_eos,
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

    async def answer(session: Session) -> int:
        if as_chat:
            prompt_token_ids = session.encode_messages([{"role": "user", "content": text}])
        else:
            prompt_token_ids = session.encode_text(text)
        async for piece in session.stream(prompt_token_ids, params):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        return 0

    raise typer.Exit(run_session(engine_args, answer))
