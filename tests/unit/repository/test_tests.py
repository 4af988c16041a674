"""What tests share is in tests/support, tests/lines or tests/fuzz: no file imports a test file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
TEST_FILE = re.compile(r"\btests(?:\.\w+)*\.test_\w+")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of test files that are imported: at the top, in functions, and in programs that are texts."""
    for node in ast.walk(ast.parse(source)):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = [node.value]
        yield from ((node.lineno, name) for text in named for name in TEST_FILE.findall(text))


def test_no_test_file_is_imported() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in imported(path.read_text())
    ]
    assert not found, "\n".join(["move what is shared to tests/support:", *found])
