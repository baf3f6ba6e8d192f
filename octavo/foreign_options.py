"""What people type who come from vLLM, llama.cpp or Ollama and what Octavo calls otherwise, does not need, or has not.

One table, for the command line, for --config files and for `LLM(...)`. Imports nothing of ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """flags: its spellings elsewhere.
    ours:  what it is called here; its value means the same, unless `why` says more. None when there is no such option
    why:   a clause without a full stop, for where `ours` is None or not an option of the command
    """

    flags: tuple[str, ...]
    ours: str | None = None
    why: str = ""


def _called(ours: str, *flags: str, why: str = "") -> ForeignOption:
    return ForeignOption(flags, ours, why)


def _without(why: str, *flags: str) -> ForeignOption:
    return ForeignOption(flags, None, why)


_FIELD = "it is a field of each request, "
_NO_GPU = "leave it out: there is no GPU backend yet, and the CPU runs every layer"
_ONE_DEVICE = "leave it out: Octavo runs a model on one device for now; --threads spreads it over cores"
_NO_GRAPHS = "leave it out: a CPU captures no graphs and compiles nothing"
_NO_LORA = "adapters are not there yet; merge the adapter into its model, and serve that"
_NO_DRAFT = "speculative decoding is not there yet; leave it out"
_NO_IMAGES = "images, audio and video are not there yet: models take text"
_ONLY_TEXT = "embeddings, classification and reranking are not there yet: models generate text"
_FILES_SAY = "leave it out: what the files are is read from the files"
_WITH_THE_MODEL = "the tokenizer comes from the model's own folder or file; put the wanted one there"
_WINDOW = "the position encoding is the model's own; use --max-model-len for a shorter window"
_LAZY_MEMORY = "leave it out: weights are packed at load, and cache memory is taken when it is first used"
_ALWAYS = "leave it out: that is always on"
_QUIET = "leave it out: nothing is logged for a request unless --access-log asks for it"
_LOGGING = "there is no such setting; --access-log logs requests, OCTAVO_DEBUG=1 shows tracebacks"
_SCHEDULER = "leave it out: the scheduler needs no such hint; --max-num-batched-tokens bounds a step"
_PREEMPTION = "leave it out: what is preempted is computed again, most of it from the prefix cache"
_STRUCTURED = "leave it out: structured outputs always run on llguidance"

FOREIGN_OPTIONS: tuple[ForeignOption, ...] = (
    # --- the same under another name ---
    _called("--max-model-len", "--ctx-size", "-c", "--n-ctx", "--num-ctx", "--context-length", "--max-seq-len"),
    _called("--max-num-seqs", "--parallel", "-np", "--n-parallel", "--max-batch-size", "--num-parallel"),
    _called("--max-num-batched-tokens", "--batch-size", "-b", "--ubatch-size", "-ub", "--n-batch", "--n-ubatch"),
    _called("--threads", "-t", "--threads-batch", "-tb", "--n-threads", "--num-threads", "--num-thread"),
    _called("--served-model-name", "--alias", "-a"),
    _called("--kv-cache-dtype", "--cache-type-k", "-ctk", "--cache-type-v", "-ctv", "--type-k", "--type-v"),
    _called("--chat-template", "--chat-template-file"),
    _called("--root-path", "--api-prefix"),
    _called("--ssl-keyfile", "--ssl-key-file"),
    _called("--ssl-certfile", "--ssl-cert-file"),
    _called("--ssl-ca-certs", "--ssl-cert-reqs"),
    _called("--request-timeout", "-to"),
    _called("--access-log", "--enable-log-requests", "--log-requests"),
    _called("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--kv-cache-memory", "--cache-ram", "-cram"),
    _called("--no-enable-prefix-caching", "--no-cache-prompt", "--disable-prefix-caching"),
    _called("--enable-prefix-caching", "--cache-prompt"),
    _called("--scheduling-policy", "--schedule-policy"),
    _called("--gpu-memory-utilization", "--mem-fraction-static", "--gpu-memory-fraction"),
    _called("--tensor-parallel-size", "--tp-size", "--tp"),
    _called("--model", "--model-path", "--hf-repo", "-hf", "-hfr", "--hf-repo-id"),
    _called("--max-tokens", "--predict", "-n", "--n-predict", "--num-predict", "--max-new-tokens",
            why=_FIELD + "max_tokens"),
    _called("--temperature", "--temp", why=_FIELD + "temperature"),
    _called("--system", "--system-prompt", "-sys", why="it is a message of each request, with the role system"),
    _called("--chat", "--conversation", "-cnv", why="leave it out: octavo chat is the conversation"),
    _called("--url", "--base-url", why="this is the server; the address is --host and --port"),
    _called("--num-requests", "--num-prompts", why="it is an option of `octavo bench serve`, --num-requests"),
    _called("--rate", "--request-rate", why="it is an option of `octavo bench serve`, --rate"),
    _called("--concurrency", "--max-concurrency", why="use --max-num-seqs for how many run at once"),
    _called("--prompt-tokens", "--random-input-len", "--input-len", "--n-prompt",
            why="it is an option of `octavo bench`, --prompt-tokens"),
    _called("--max-tokens", "--random-output-len", "--output-len", "--n-gen",
            why="it is an option of `octavo bench`, --max-tokens"),
    _called("--api", "--backend", "--endpoint-type", why="leave it out: the backend is --device"),
    _called("--json", "--result-filename", "--output-json", "--save-result",
            why="it is an option of `octavo bench`, --json FILE"),
    _called("--scenario", "--dataset-name", why="it is an option of `octavo bench serve`, --scenario"),
    # --- said elsewhere ---
    _without("name the file behind the id: ORG/NAME:FILE.gguf", "--hf-file", "-hff"),
    _without("download the file, and give its path as MODEL", "--model-url", "-mu"),
    _without("set HF_TOKEN, or log in with `hf auth login`", "--hf-token", "-hft"),
    _without("set OCTAVO_HOME (wheels) or HF_HOME (the Hub's files)", "--download-dir", "--models-dir", "--cache-dir"),
    _without("give the key with --api-key, or in OCTAVO_API_KEY", "--api-key-file"),
    _without("the prompt is the first argument of octavo generate, or stdin", "--prompt", "-p", "--file", "-f"),
    _without(_FIELD + "top_p", "--top-p"),
    _without(_FIELD + "top_k", "--top-k"),
    _without(_FIELD + "min_p", "--min-p"),
    _without(_FIELD + "repetition_penalty", "--repeat-penalty", "--repetition-penalty"),
    _without(_FIELD + "presence_penalty", "--presence-penalty"),
    _without(_FIELD + "frequency_penalty", "--frequency-penalty"),
    _without(_FIELD + "logit_bias", "--logit-bias", "-l"),
    _without(_FIELD + "structured_outputs", "--grammar", "--grammar-file", "--json-schema", "-j", "--format"),
    _without("use stop in a request, or --stop of octavo generate", "--reverse-prompt", "-r"),
    _without("choose it in a request, with chat_template_kwargs", "--reasoning-budget", "--think", "--hidethinking"),
    _without("leave it out: defaults are the API's, and a request's own fields change them",
             "--generation-config", "--override-generation-config", "--default-chat-template-kwargs"),
    # --- not needed here ---
    _without(_QUIET, "--disable-log-requests", "--no-enable-log-requests", "--disable-uvicorn-access-log"),
    _without("leave it out: no statistics are logged; they are at /metrics", "--disable-log-stats", "--log-stats"),
    _without("leave it out: up to 20 log-probabilities may always be asked for", "--max-logprobs"),
    _without(_FILES_SAY, "--load-format", "--config-format", "--model-impl", "--model-loader-extra-config"),
    _without("leave it out: prompts of any length share a step with running sequences", "--num-scheduler-steps",
             "--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
    _without(_SCHEDULER, "--scheduler-delay-factor", "--async-scheduling", "--no-async-scheduling",
             "--scheduler-cls", "--multi-step-stream-outputs", "--stream-interval"),
    _without(_PREEMPTION, "--swap-space", "--preemption-mode", "--slot-save-path", "--kv-offloading-size"),
    _without(_NO_GRAPHS, "--max-seq-len-to-capture", "--cuda-graph-sizes", "--compilation-config", "-O", "-cc",
             "--cudagraph-capture-sizes", "--optimization-level", "--disable-cuda-graph"),
    _without(_NO_GPU, "--n-gpu-layers", "-ngl", "--gpu-layers", "--num-gpu", "--main-gpu", "-mg", "--n-cpu-moe",
             "--cpu-moe", "--override-tensor", "-ot", "--cpu-offload-gb", "--no-kv-offload", "-nkvo", "--kv-offload",
             "--no-op-offload", "-dev", "--attention-backend"),
    _without(_ONE_DEVICE, "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--split-mode", "-sm",
             "--tensor-split", "-ts", "--distributed-executor-backend", "--nnodes", "--node-rank", "--master-addr",
             "--master-port", "--enable-expert-parallel", "--disable-custom-all-reduce", "--rpc", "--worker-cls",
             "--data-parallel-size-local", "--max-parallel-loading-workers", "--decode-context-parallel-size"),
    _without("leave it out: one API process feeds the engine process", "--api-server-count",
             "--disable-frontend-multiprocessing", "--threads-http", "--headless", "--tokenizer-pool-size"),
    _without("leave it out: memory and threads are bound by themselves", "--numa", "--cpu-mask", "-C", "--cpu-range",
             "-Cr", "--cpu-strict", "--prio", "--poll"),
    _without(_LAZY_MEMORY, "--mlock", "--no-mmap", "--mmap", "--no-warmup", "--warmup", "--no-repack",
             "--safetensors-load-strategy", "--check-tensors", "--use-v2-block-manager", "--keepalive", "--keep-alive"),
    _without(_ALWAYS, "--flash-attn", "-fa", "--cont-batching", "-cb", "--jinja", "--metrics",
             "--enable-request-id-headers", "--enable-prompt-tokens-details",
             "--kv-unified", "-kvu", "--enable-metrics"),
    _without("leave it out: what runs is at /metrics, what is served at /v1/models", "--slots", "--props"),
    _without("leave it out: content may be a text or a list of text parts, either way",
             "--chat-template-content-format"),
    _without("leave it out: a sliding window keeps just the blocks that it needs", "--swa-full"),
    _without("it cannot be turned off: sequences are always batched as they come", "--no-cont-batching", "-nocb"),
    _without("leave it out: there is no web page to turn off but /docs", "--no-webui", "--webui", "--path"),
    _without(_STRUCTURED, "--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend",
             "--guided-decoding-disable-fallback"),
    _without("leave it out: a context that is full ends the answer, with finish_reason length",
             "--context-shift", "--no-context-shift", "--keep"),
    _without("leave it out: a window is never cut off silently; use --max-model-len", "--disable-sliding-window",
             "--disable-hybrid-kv-cache-manager"),
    _without("leave it out: blocks are always told apart by a hash of all their tokens",
             "--prefix-caching-hash-algo", "--cache-reuse", "--slot-prompt-similarity", "-sps"),
    # --- not there (yet) ---
    _without(_WITH_THE_MODEL, "--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--skip-tokenizer-init",
             "--hf-config-path", "--vocab-file"),
    _without("code of a checkpoint is never run, so it has no revision; leave it out", "--code-revision"),
    _without(_WINDOW, "--rope-scaling", "--rope-theta", "--rope-scale", "--rope-freq-base", "--rope-freq-scale",
             "--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast"),
    _without("a model's settings cannot be overridden; change its config.json", "--hf-overrides", "--override-kv",
             "--override-neuron-config", "--override-pooler-config"),
    _without(_NO_LORA, "--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras",
             "--lora-dtype", "--fully-sharded-loras", "--lora", "--lora-scaled", "--lora-init-without-apply",
             "--lora-extra-vocab-size", "--enable-lora-bias", "--lora-path", "--control-vector"),
    _without(_NO_DRAFT, "--speculative-config", "--speculative-model", "--num-speculative-tokens", "--model-draft",
             "-md", "--draft", "--draft-max", "--draft-min", "--draft-p-min", "--ctx-size-draft", "-cd",
             "--n-gpu-layers-draft", "-ngld", "--ngram-prompt-lookup-max"),
    _without(_NO_IMAGES, "--mmproj", "--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path",
             "--mm-processor-cache-gb", "--disable-mm-preprocessor-cache", "--mmproj-url", "--no-mmproj", "--image"),
    _without(_ONLY_TEXT, "--task", "--runner", "--convert", "--embedding", "--embeddings", "--reranking", "--rerank",
             "--pooling", "--pooler-config", "--enable-prompt-embeds"),
    _without("leave it out: a cache in int8 needs no scales from a file", "--calculate-kv-scales",
             "--quantization-param-path"),
    _without(_LOGGING, "--uvicorn-log-level", "--log-config-file", "--max-log-len", "--log-disable", "--log-file",
             "--log-level", "--verbose", "-v", "--log-verbosity", "-lv"),
    _without("traces are not there yet; --access-log has each request's times", "--otlp-traces-endpoint",
             "--collect-detailed-traces"),
    _without("moving a cache between servers is not there yet", "--kv-transfer-config", "--kv-events-config"),
    _without("middleware is not there; put a proxy before the server (see --root-path)", "--middleware", "--uds",
             "--lora-request-plugin", "--tool-parser-plugin", "--tool-server", "--reasoning-parser-plugin"),
    _without("set a request's own stream_options.include_usage", "--enable-force-include-usage"),
    _without("an answer's role is always assistant", "--response-role"),
    _without("ask for return_token_ids in a request", "--return-tokens-as-token-ids"),
    _without("certificates are read at the start; restart for a new one", "--enable-ssl-refresh"),
    _without("it cannot be turned off; a proxy may hide /docs", "--disable-fastapi-docs"),
    _without("giving memory back while idle is not there yet", "--enable-sleep-mode"),
)  # fmt: skip

FOREIGN_COMMANDS: dict[str, str] = {
    "run": "octavo chat MODEL talks with a model, octavo serve MODEL serves it",
    "pull": "a model is fetched when it is first used: octavo serve MODEL",
    "push": "models are not published from here; use the Hugging Face Hub's own `hf upload`",
    "list": "models are kept in ~/.cache/octavo and ~/.cache/huggingface; a server lists its own at /v1/models",
    "ls": "models are kept in ~/.cache/octavo and ~/.cache/huggingface; a server lists its own at /v1/models",
    "ps": "a server lists its model at /v1/models, and what it does at /metrics",
    "stop": "Ctrl-C ends octavo serve, and so does SIGTERM",
    "rm": "models are kept in ~/.cache/octavo and ~/.cache/huggingface; delete a folder there",
    "show": "octavo serve MODEL prints what it is and what memory it takes",
    "create": "there is no Modelfile; give octavo serve its options, or a YAML file with --config",
    "server": "it is octavo serve MODEL",
    "start": "it is octavo serve MODEL",
    "launch": "it is octavo serve MODEL",
    "cli": "it is octavo generate or octavo chat",
    "complete": "it is octavo generate PROMPT",
    "benchmark": "it is octavo bench",
    "latency": "it is octavo bench step, or octavo bench throughput --batch-sizes 1",
    "run-batch": "batches of requests are not there yet; send them to octavo serve at once",
    "collect-env": "octavo serve prints the machine and the version when it starts",
}

_BY_FLAG = {flag: option for option in FOREIGN_OPTIONS for flag in option.flags}


def find_foreign_option(flag: str) -> ForeignOption | None:
    """flag: as typed, with one or two dashes; underscores count as dashes."""
    dashed = _with_dashes(flag)
    return _BY_FLAG.get(dashed) or _BY_FLAG.get(dashed.partition(".")[0])


def describe_unknown_option(flag: str, value: str | None, known: Collection[str], spell: str = "{}") -> str:
    """A clause on what to do about an option that is not among the known ones; "" when there is nothing to say.

    flag, known: with their dashes. value: typed with it. spell: how an option of ours is shown, such as "`{}`"
    """
    foreign = find_foreign_option(flag)
    if foreign is not None and foreign.ours in known:
        has_value = value is not None and foreign.ours not in ("--kv-cache-dtype", "--kv-cache-memory-bytes", "--api")
        shown = spell.format(foreign.ours)
        return f"here it is {shown}" + (f" {value}" if has_value else "")
    if foreign is not None:
        return foreign.why or f"it is {foreign.ours} of `octavo serve`"
    flag = _with_dashes(flag)
    if (negated := _describe_negated(flag, known, spell)) is not None:
        return negated
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    return f"did you mean {spell.format(near[0])}?" if near else ""


def _describe_negated(flag: str, known: Collection[str], spell: str) -> str | None:
    """--no-X and --disable-X: the nearest spelling of ours would be X itself, the opposite of what was meant."""
    for beginning in ("--no-", "--disable-", "--without-"):
        if not flag.startswith(beginning):
            continue
        word = flag[len(beginning) :]
        for ours in (f"--no-{word}", f"--no-enable-{word}"):
            if ours in known:
                return f"here it is {spell.format(ours)}"
        for positive in (f"--{word}", f"--enable-{word}"):
            if positive in known:
                return f"leave it out: that is how it is without {spell.format(positive)}"
            if find_foreign_option(positive) is not None:
                return f"leave it out: there is no {positive} here, so nothing to turn off"
    return None


def describe_unknown_argument(name: str, known: Collection[str]) -> str:
    """The same for a keyword argument in Python; names there have underscores and no dashes."""
    flags = {"--" + argument.replace("_", "-") for argument in known}
    remark = describe_unknown_option("--" + name.replace("_", "-"), None, flags)
    for flag in flags:
        if re.search(f"(?<!\\S){flag}(?![\\w-])", remark):
            remark = remark.replace(flag, flag[2:].replace("-", "_"))
    return remark


def _with_dashes(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag
