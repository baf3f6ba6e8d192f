"""Keeps the import directions of ARCHITECTURE.md true, by walking the syntax trees of the whole package.

An import inside a function counts like any other: as the directions have no cycle, none can be dodged.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "octavo"

# What passes between the core and everything around it.
PLAIN_DATA = ("core.interfaces", "core.request", "core.sampling_params")

# Part of the package -> what of ours it may import, beside itself and errors.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": (),
    "machine": (),
    "report": (),
    "foreign_options": (),
    "engine_args": ("foreign_options",),
    "prometheus_text": (),
    "memory_fit": ("engine_args", "machine", "report"),
    "config": ("core.interfaces", "engine_args", "machine", "memory_fit", "report"),
    "metrics": ("core.interfaces", "core.sampling_params", "prometheus_text"),
    "_cpu": (),  # the compiled kernels
    "ops": ("_cpu",),
    "quant": ("ops",),
    "models": ("ops", "quant"),
    "weights": ("ops.interface", "quant"),
    "lora": ("models.config", "models.layers", "ops.interface", "weights"),
    "text": (),
    "structured": ("core.interfaces",),
    "executor": (*PLAIN_DATA, "config", "lora", "machine", "models", "ops", "report", "weights"),
    "engine": ("config", "core", "executor", "metrics", "report", "structured", "text", "weights"),
    # Of structured only what reads a request's fields: grammars are compiled behind the engine's door.
    "server": (*PLAIN_DATA, "engine", "prometheus_text", "structured.json_text", "structured.request", "text"),
    # Beside the public names: the ops and the executor that `bench kernels` and `bench step` look into.
    "bench": ("_cpu", "executor.local", "machine", "ops", "report", "weights.model_source"),
}
# What stands outside: the public names, and whatever is run as a command.
MAY_IMPORT_ANYTHING = ("__init__", "__main__", "cli")

# Third-party packages, for the parts that are to stay light. The others may use what pyproject.toml lists.
MAY_USE: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "core": frozenset(),
    "machine": frozenset(),
    "report": frozenset(),
    "engine_args": frozenset(),
    "foreign_options": frozenset(),
    "memory_fit": frozenset(),
    "config": frozenset(),
    "ops": frozenset({"numpy"}),
    "quant": frozenset({"numpy"}),
    "models": frozenset({"numpy"}),
    "text": frozenset({"tokenizers", "jinja2"}),
}
MUST_NOT_USE = {"server": frozenset({"numpy", "torch"})}

FILES = sorted(PACKAGE.rglob("*.py"))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names as far as they can be modules: `from octavo.core import request` gives octavo.core.request."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(file: Path) -> str:
    """The folder or the module right below octavo/; "__main__" for what is run with python -m."""
    return "__main__" if file.name == "__main__.py" else file.relative_to(PACKAGE).with_suffix("").parts[0]


def find_faults(part: str, names: Iterator[str]) -> list[str]:
    if part in MAY_IMPORT_ANYTHING:
        return []
    allowed = (part, "errors", *MAY_IMPORT[part])
    faults = []
    for name in names:
        top, _, rest = name.partition(".")
        if top == "octavo":
            # `import octavo` alone adds nothing: any import of ours imports the package first. `from octavo import LLM`
            # is for those outside.
            is_public = rest == "" or (part == "bench" and "." not in rest)
            is_allowed = is_public or any(f"{rest}.".startswith(f"{module}.") for module in allowed)
        elif top in sys.stdlib_module_names:
            is_allowed = True
        else:
            is_allowed = top in MAY_USE.get(part, {top}) and top not in MUST_NOT_USE.get(part, ())
        if not is_allowed:
            faults.append(name)
    return faults


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_follow_the_directions(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    part = part_of(file)
    assert part in MAY_IMPORT or part in MAY_IMPORT_ANYTHING, f"give octavo/{part} its directions here"
    assert find_faults(part, imported_names(tree)) == []


def test_the_directions_have_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        parts = {part for part in MAY_IMPORT if {name.split(".")[0] for name in MAY_IMPORT[part]} <= done | {part}}
        assert parts - done, f"a cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= parts


@pytest.mark.parametrize(
    ("part", "line", "fault"),
    [
        ("core", "import numpy", "numpy"),
        ("core", "from octavo.config import EngineArgs", "octavo.config.EngineArgs"),
        ("models", "from octavo.core.interfaces import CoreConfig", "octavo.core.interfaces.CoreConfig"),
        ("server", "def f():\n    from octavo.core import scheduler", "octavo.core.scheduler"),
        ("server", "import numpy as np", "numpy"),
        ("engine", "from octavo.cli.main import main", "octavo.cli.main.main"),
        ("ops", "import torch", "torch"),
        ("bench", "from octavo.engine.llm import LLM", "octavo.engine.llm.LLM"),
    ],
)
def test_a_wrong_import_is_found(part: str, line: str, fault: str) -> None:
    assert find_faults(part, imported_names(ast.parse(line))) == [fault]
