"""Where a model lies on this machine, and where fetched ones are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelSource:
    """path: the folder (config.json and *.safetensors), or the .gguf file. name: what to call the model by default."""

    path: Path
    kind: Literal["folder", "gguf"]
    name: str


def cache_home() -> Path:
    """OCTAVO_HOME, or octavo in the user's cache folder. It need not exist yet."""
    home = os.environ.get("OCTAVO_HOME")
    if home:
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is to be ignored.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "octavo"
