"""Imports point down, no files import each other in a circle, plug-ins never import each other."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from nbtrain.machine.registry import STRATEGIES

ROOT = Path(__file__).resolve().parents[3]
Imports = dict[str, dict[str, list[str]]]
"""file → each file that it imports → where, and the line."""

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run(command, cwd=directory, env=os.environ, capture_output=True, text=True, check=False)


def test_the_contract_knows_every_strategy_of_the_registry() -> None:
    kept = (ROOT / "pyproject.toml").read_text().split('id = "strategies"')[1].split("[[")[0]
    listed = set(re.findall(r'"(nbtrain\.strategies\.\w+)"', kept))
    assert listed == {entry.where.split(":")[0] for entry in STRATEGIES.values()}


NAMED = {
    "notebook/session.py: fsdp": "a word that the text of a cell that trains may have",
    "worker/process/other_trainers.py: horovod": "the package",
}
"""Where the core says the name of a strategy, and why."""


def test_the_core_names_no_strategy() -> None:
    """What differs between strategies is data: of the registry, or of the strategy."""
    names = STRATEGIES.keys() - {"none", "single", "sharded", "deepspeed", "xla"}  # words of other things, too
    found = []
    for room in ("notebook", "engines", "watch", "worker", "exchange", "base"):
        for path in sorted((ROOT / "nbtrain" / room).rglob("*.py")):
            said = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            found += [f"{path.relative_to(ROOT / 'nbtrain')}: {name}" for name in sorted(names & said)]
    assert set(found) == NAMED.keys()


def test_imports_keep_to_the_layers() -> None:
    told = lint(ROOT)
    assert told.returncode == 0, told.stdout + told.stderr


def imports_of(root: Path) -> Imports:
    """What each file of the package below `root` imports: at its top, in functions and for types only."""
    files = {}
    for path in sorted((root / "nbtrain").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: Imports = {}
    for name, path in files.items():
        found[name] = {}
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                line = f"{path.relative_to(root)}:{node.lineno}: {text.splitlines()[node.lineno - 1].strip()}"
                for other in _imported(node, files) - {name}:
                    found[name].setdefault(other, []).append(line)
    return found


def _imported(node: ast.Import | ast.ImportFrom, files: dict[str, Path]) -> set[str]:
    """`from a import b` imports the file `a.b` where there is one, and `a` otherwise; ruff bans relative imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & files.keys()
    inner = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in files else str(node.module) for name in inner} & files.keys()


def test_no_circles_between_files() -> None:
    imports = imports_of(ROOT)
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        circle = pairwise(error.args[1])  # each file is imported by the next
        lines = [line for file, by in circle for line in imports[by].get(file, ())]
        pytest.fail("\n    ".join(["a circle of files:", *dict.fromkeys(lines)]))


def test_no_name_in_a_package_is_that_of_a_file_beside_it() -> None:
    """When such a file is imported it takes the name's place, whatever the package has bound it to."""
    taken = []
    for page in (ROOT / "nbtrain").rglob("__init__.py"):
        package = ".".join(page.parent.relative_to(ROOT).parts)
        beside = {path.stem for path in page.parent.iterdir()} - {"__init__"}
        for node in ast.parse(page.read_text()).body:
            bound: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                own = {package, *(f"{package}.{name}" for name in beside)}
                bound = [alias.asname or alias.name for alias in node.names if node.module not in own]
            elif isinstance(node, ast.Import):
                bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound = [node.name]
            elif isinstance(node, ast.Assign):
                bound = [target.id for target in node.targets if isinstance(target, ast.Name)]
            taken += [f"{package}: {name}" for name in bound if name in beside]
    assert not taken
