"""Whether what nbtrain/compat uses of other packages is there, and whether each of its functions has a test here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nbtrain.compat
from nbtrain.base.errors import VersionMismatch
from nbtrain.compat import internals, strategy_packages
from nbtrain.compat import tested_versions as versions

FOLDER = Path(nbtrain.compat.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
FRAME = (
    "internals", "strategy_packages", "tested_versions", "namespaces", "type_names", "training_libraries", "intercept",
    "replaced_functions",
)  # fmt: skip
"""They touch nobody's internals: what the other files are made with, and tables of names to compare with."""

_ON_DISK = "what DeepSpeed reads is compiled for a minute: test_deepspeed.py::test_offloaded_to_a_disk"
NO_TEST: dict[str, str] = {
    "deepspeed.read_from_disk": _ON_DISK,
    "deepspeed.write_to_disk": _ON_DISK,
    "deepspeed.leave_on_disk": _ON_DISK,
}
"""`file.function` → why there is no test of it under tests/compat."""


def load(name: str) -> ModuleType:
    """Leaves the test out where the file's package is not installed."""
    try:
        found = import_module(f"nbtrain.compat.{name}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("nbtrain"):
            raise
        pytest.skip(f"{error.name} is not installed")
    package = found.its.package
    if package != "python" and not versions.installed(package):
        pytest.skip(f"{package} is not installed")
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FRAME])
def test_nothing_is_missing(name: str) -> None:
    assert load(name).its.check() == []


# --- every function has a test -------------------------------------------------------------------


def offers(name: str) -> Iterator[str]:
    """Functions and classes of a file, and what it takes as it is from its package."""
    for node in ast.parse((FOLDER / f"{name}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found, value = [node.name], None
        elif isinstance(node, ast.Assign):
            found, value = [one.id for one in node.targets if isinstance(one, ast.Name)], node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found, value = [node.target.id], node.value
        else:
            continue
        taken = isinstance(value, ast.Call) and ast.unparse(value.func) == "its.name"
        if value is None or taken:
            yield from (f"{name}.{one}" for one in found if not one.startswith("_"))


def mentioned(path: Path) -> Iterator[str]:
    """`file.name` for whatever of nbtrain.compat a test uses, under the name by which it has imported it."""
    tree = ast.parse(path.read_text())
    files: dict[str, str] = {}
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "nbtrain.compat":
            files |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbtrain.compat."):
            file = str(node.module).rpartition(".")[2]
            names |= {one.asname or one.name: f"{file}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            files |= {str(one.asname): one.name.rpartition(".")[2] for one in node.names if one.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in files:
            yield f"{files[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]


def test_every_function_has_a_test() -> None:
    there = {one for name in NAMES if name not in FRAME for one in offers(name)}
    tested = {one for path in Path(__file__).parent.glob("test_*.py") for one in mentioned(path)}
    assert there - tested - NO_TEST.keys() == set(), "these have no test under tests/compat"
    assert NO_TEST.keys() <= there - tested, "these are no exceptions: they are gone, or have a test"
    assert all(NO_TEST.values())


# --- internals -----------------------------------------------------------------------------------


class Made:
    declared: int

    def __init__(self, first: int, second: int = 0) -> None:
        self.first = first


def test_what_a_package_lacks_is_said_in_words() -> None:
    here = f"{__name__}.Made"
    its = internals.Internals("pytest")
    its.members(here, "__init__")
    its.fields(here, "first", "declared")
    its.takes(f"{here}.__init__", "self", "first")
    assert its.name(here) is Made
    assert its.check() == []
    its.members(here, "gone", "lost")
    its.fields(here, "second", "third")
    its.takes(f"{here}.__init__", "self", "second")
    its.members("nbtrain.nowhere", "x")
    assert its.check() == [
        "Made has no gone, lost",
        "Made has no second, third",
        f"{here}.__init__ takes (self, first), not (self, second)",
        "there is no nbtrain.nowhere",
    ]


def test_what_is_there_is_found_by_its_path() -> None:
    assert internals.find(f"{__name__}.Made.__init__") is Made.__init__
    assert internals.find("nbtrain.compat.strategy_packages") is strategy_packages
    with pytest.raises(ModuleNotFoundError):
        internals.find("nbtrain.nowhere")


def test_a_name_that_is_not_there_says_so_when_it_is_used() -> None:
    its = internals.Internals("pytest")
    for path in ("nbtrain.nowhere.Thing", "nbtrain.errors.Nothing", "no_such_package"):
        absent: Any = its.name(path)
        assert isinstance(absent, internals.Missing)
        for use in (lambda one=absent: one(), lambda one=absent: one.x, lambda one=absent: isinstance(1, one)):
            with pytest.raises(VersionMismatch, match=f"pytest has no `{path}` here"):
                use()
    assert len(its.check()) == 3


# --- versions and fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "older", "newer"), [
    ("2.7.1", True, False), ("2.8.0", False, False), ("2.10.0+cu128", False, False), ("2.15.0rc1", False, False),
    ("2.15.1", False, True), ("3.0a1", False, True), ("", False, False),
])  # fmt: skip
def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch, here: str, older: bool, newer: bool) -> None:
    monkeypatch.setattr(versions, "TRIED", {"torch": ("2.8.0", "2.15.0")})
    monkeypatch.setattr(versions, "installed", lambda package: here.partition("+")[0])
    assert (versions.is_older("torch"), versions.is_newer("torch")) == (older, newer)


def test_what_was_tried_stands_in_order() -> None:
    for package, tried in versions.TRIED.items():
        assert list(tried) == sorted(tried, key=versions.release)
        assert (versions.oldest(package), versions.newest(package)) == (tried[0], tried[-1])
    assert versions.newest("nothing") == versions.oldest("nothing") == versions.installed("no-such-package") == ""
    assert "+" not in versions.installed("torch") != ""


@pytest.mark.parametrize("here", ["2.7.0", "2.9.1", "2.99.0"])
def test_a_strategy_that_does_not_fit_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, here: str) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: here)
    monkeypatch.setattr(
        strategy_packages, "lacks", lambda file: ("FSDPState has no _lazy_init",) if file == "tensors" else ()
    )
    said = strategy_packages.refusal("fsdp", ["autograd_engine", "tensors"], instead="zero1")
    assert said.startswith(f"fsdp does not fit torch {here}: FSDPState has no _lazy_init; ")
    newest = versions.newest("torch")
    assert said.endswith(f'Write --strategy zero1, or install one that was: pip install "torch=={newest}"')
    assert "\n" not in said
    assert strategy_packages.refusal("fsdp", ["autograd_engine"]) == ""


def test_what_is_installed_fits() -> None:
    assert strategy_packages.package_of("tensors") == "torch"
    assert set(strategy_packages.EVERYWHERE) <= set(NAMES)
    assert [strategy_packages.lacks(name) for name in strategy_packages.EVERYWHERE] == [()] * len(
        strategy_packages.EVERYWHERE
    )
    assert strategy_packages.refusal("ddp", strategy_packages.EVERYWHERE) == ""


@pytest.mark.parametrize("code", ["from torch import _gone", "import torch; torch._gone()"])
def test_an_error_of_a_newer_package_says_so(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def explained(run: Any, *args: Any) -> str:
        try:
            run(*args)
        except Exception as error:
            strategy_packages.explain(error)
            return str(error)
        raise AssertionError

    here = compile(code, "<a file of nbtrain's>", "exec")
    ours, theirs = {"__name__": "nbtrain.worker.loop.steps"}, {"__name__": "__main__"}
    sign = f"nbtrain was run with torch up to {versions.newest('torch')}, and here is 2.99.0: pip install"
    strategy_packages.explain(None)
    assert sign not in explained(exec, here, ours)
    monkeypatch.setattr(versions, "installed", lambda package: "2.99.0" if package == "torch" else "")
    assert sign in explained(exec, here, ours)
    assert sign in explained(internals.Missing("torch has no `gone` here"))
    assert sign not in explained(exec, here, theirs)
    assert sign not in explained(exec, compile("1/0", "", "exec"), ours)
