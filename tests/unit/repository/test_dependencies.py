"""What nbtrain imports is what it declares: nothing works only because something else has brought a package."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from nbtrain.machine import registry
from nbtrain.notebook.doctor import PACKAGES
from tests.support.libraries import OF_NOTEBOOKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

OF_AN_EXTRA = {
    "deepspeed": (*("strategies/deepspeed/", "compat/deepspeed.py"), "worker/checkpoints/open_checkpoint.py"),
    "fairscale": ("strategies/sharded/", "compat/fairscale.py"),
    "horovod": ("strategies/horovod/", "compat/horovod.py"),
    "lightning": ("annexes/frameworks/lightning/register_",),
    "ray": ("annexes/machines/ray_cluster.py", "annexes/machines/ray_actor.py"),
    "server": ("watch/server/",),
}
"""The files that may count on what an extra installs: they are imported where it is asked for."""

COMES_WITH = {
    "pytorch-lightning": "lightning", "comm": "ipywidgets", "traitlets": "ipywidgets", "pyzmq": "ipykernel",
    "matplotlib-inline": "ipykernel", "tornado": "jupyter-server",
}  # fmt: skip
"""What nbtrain speaks to only through a package that it declares, and that cannot do without it."""

OF_THE_PLACE = {
    "torch-xla": ("strategies/xla/", "compat/xla.py"),  # its version is the machine's: no extra could name it
    "pandas": ("worker/process/library_settings.py",),  # what the notebook has set of it follows to the ranks
    "matplotlib": ("worker/process/library_settings.py",),
}
"""Used where it is installed."""

NAMED = {"zmq": "pyzmq", "IPython": "ipython", "jupyter_server": "jupyter-server", "torch_xla": "torch-xla"}


@cache
def distributions() -> Mapping[str, list[str]]:
    return packages_distributions()  # it reads the records of all


def distribution(module: str) -> str:
    """Who brings this module, as pip calls it."""
    found = distributions().get(module, [NAMED.get(module, module)])
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def names(requirements: list[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", one.strip())[0]).lower() for one in requirements}


def needed(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules that are imported without an `except` for their being absent, with the line."""
    if isinstance(node, ast.Try) and any("ImportError" in _caught(one) for one in node.handlers):
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            yield from needed(part)
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from ((one.name.split(".")[0], node.lineno) for one in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0], node.lineno
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from ((str(one.value).split(".")[0], node.lineno) for one in node.args if isinstance(one, ast.Constant))
    for child in ast.iter_child_nodes(node):
        yield from needed(child)


def _caught(handler: ast.ExceptHandler) -> str:
    caught = ast.unparse(handler.type) if handler.type else "Exception"
    return caught.replace("ModuleNotFoundError", "ImportError").replace("Exception", "ImportError")


@pytest.mark.slow
def test_whatever_is_imported_is_declared() -> None:
    always = names(PROJECT["dependencies"])
    extras = {extra: names(PROJECT["optional-dependencies"][extra]) for extra in OF_AN_EXTRA}
    undeclared, used = [], set()
    for path in sorted((ROOT / "nbtrain").rglob("*.py")):
        place = path.relative_to(ROOT / "nbtrain").as_posix()
        here = set(always)
        for extra, files in OF_AN_EXTRA.items():
            if place.startswith(files):
                here |= extras[extra]
        for name, files in OF_THE_PLACE.items():
            if place.startswith(files):
                here.add(name)
        for module, line in needed(ast.parse(path.read_text())):
            if module in sys.stdlib_module_names or module == "nbtrain":
                continue
            name = distribution(module)
            used.add(name)
            if name not in here and COMES_WITH.get(name) not in here:
                undeclared.append(f"nbtrain/{place}:{line}: {module}")
    assert not undeclared, "declare them in pyproject.toml, or catch that they are absent"
    assert used >= COMES_WITH.keys(), "what comes with another package is no longer used"


@pytest.mark.parametrize("name", COMES_WITH)
def test_what_comes_with_a_package_does_come(name: str) -> None:
    try:
        wants = requires(COMES_WITH[name]) or []
    except PackageNotFoundError:
        pytest.skip(f"{COMES_WITH[name]} is not installed")
    assert name in names([one for one in wants if "extra ==" not in one])


def test_the_doctor_asks_for_what_is_declared() -> None:
    declared = {next(iter(names([one]))): one for one in PROJECT["dependencies"]}
    for name, least in PACKAGES.items():
        assert f">={least}" in declared[name]


def test_what_is_declared_is_pinned() -> None:
    pinned = names([line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line])
    assert names(PROJECT["dependencies"]) <= pinned


def test_every_pip_command_of_the_makefile_is_pinned() -> None:
    """torch above all: what is installed later would else replace it by a newer one, of gigabytes."""
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^PIP := (.*)$", makefile, re.MULTILINE)
    assert "-c constraints.txt" in command
    assert makefile.count("pip install") == 1, "write $(PIP)"
    assert re.findall(r"pip install.*", (ROOT / ".ci" / "horovod").read_text()) == [
        'pip install --quiet --disable-pip-version-check -c "$constraints" "$@"'
    ]
    assert any(line.startswith("torch==") for line in (ROOT / "constraints.txt").read_text().splitlines())


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_imports_is_installed_for_it(path: Path) -> None:
    """`make demo` installs nbtrain[notebooks] for it, and nothing that is compiled."""
    installed = names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["notebooks"]])
    if path.stem in OF_NOTEBOOKS:  # it says what is missing
        libraries = ROOT / "tests" / "libraries" / f"{OF_NOTEBOOKS[path.stem]}.txt"
        installed |= names(libraries.read_text().splitlines()[1:])
    text = "\n".join(
        "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"
    )
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)) - sys.stdlib_module_names - {"nbtrain"}
    assert {distribution(name) for name in imported} <= installed


LINES = {
    "deepspeed": 'pip install "deepspeed>=0.19.8,<0.20" ninja',
    "sharded": "pip install --no-build-isolation fairscale",
    "horovod": f"NBTRAIN_ENVIRONMENT={sys.prefix} .ci/horovod in a checkout of nbtrain",
    "xla": "pip install torch_xla",
}


@pytest.mark.parametrize("name", [name for name, entry in registry.STRATEGIES.items() if entry.needs.packages])
def test_a_missing_package_says_the_line_that_adds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = registry.STRATEGIES[name].needs
    for package in needs.packages:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert registry.missing(needs) == f"{', '.join(needs.packages)} is not installed: {LINES[name]}"
    if name == "deepspeed":
        assert PROJECT["optional-dependencies"][name][0] in LINES[name]
