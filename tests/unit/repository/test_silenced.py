"""What a checker is not to say, and errors that are caught whatever they are: each says why, in a comment."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "nbtrain"
MARK = re.compile(r"# (type: ignore|noqa)(\[[^\]]*\]|: [A-Z]+[0-9]+)?")
ANY = {"Exception", "BaseException"}


def silenced(text: str) -> list[int]:
    """The numbers of lines that silence a checker, or catch any error and raise none, without a comment there, above or
    in the handler's first line."""
    lines = ["", *text.splitlines(), ""]
    marks = [at for at, line in enumerate(lines) if MARK.search(line)]
    found = [at for at in marks if not MARK.split(lines[at])[-1].strip() and "# " not in MARK.sub("", lines[at - 1])]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and not any(isinstance(one, ast.Raise) for one in ast.walk(node)):
            names = ANY if node.type is None else {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)}
            near = lines[node.lineno], lines[node.lineno + 1].strip()
            if names & ANY and "# " not in near[0] and not near[1].startswith("# "):
                found.append(node.lineno)
    return sorted(found)


def test_what_is_silenced_says_why() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): silenced(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: numbers for path, numbers in found.items() if numbers} == {}
