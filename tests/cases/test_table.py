"""The table in README.md and the tests beside it agree."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_case_has_its_tests_and_the_table_counts_them() -> None:
    tests: dict[str, list[str]] = {}
    for file in FOLDER.glob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_h\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            for number in re.findall(r"_h(\d\d)(?=_)", name):
                tests.setdefault(f"H{number}", []).append(file.name)
    rows = re.findall(
        r"^\| (H\d\d) \| .* \| (.+?) \| (\d+) \|$", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE
    )
    told = {case: (set(files.split(", ")), int(count)) for case, files, count in rows}
    assert told == {case: (set(files), len(files)) for case, files in tests.items()}
    assert sorted(told) == [f"H{number:02}" for number in range(1, 58)]
