"""The public surface, frozen: a name that appears or goes is a decision, not an accident."""

import ast
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import nbtrain

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = {
    "Facts", "Promises", "Shards", "TorchDistributor", "Component", "Piece", "Prepared", "Strategy", "__version__",
    "background", "check", "empty", "errors", "history", "load", "load_ipython_extension", "notebook_launcher",
    "picker", "plan", "predict", "resumable", "run", "save", "unload_ipython_extension",
    "whole", "wrap",
}  # fmt: skip
ON_A_RANK = {"rank", "world_size", "local_rank", "device", "log", "reduce", "gather", "barrier", "setup"}
HEAVY = ("torch", "IPython", "zmq", "numpy", "ipywidgets", "anywidget", "cloudpickle", "psutil", "jupyter_server")


def in_fresh_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_public_names_are_these() -> None:
    assert set(nbtrain.__all__) == PUBLIC
    assert set(nbtrain.ON_A_RANK) == ON_A_RANK
    assert set(dir(nbtrain)) >= PUBLIC | ON_A_RANK


def test_the_version_stands_in_one_place() -> None:
    """hatch reads it from there; tests/kernel/test_wheel.py compares what it builds."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert '[tool.hatch.version]\npath = "nbtrain/__init__.py"' in project
    assert version("nbtrain") == nbtrain.__version__, (
        "installed when it was another: .venv/bin/pip install --no-deps -e ."
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'distrubuted'"):
        nbtrain.distrubuted  # noqa: B018


@pytest.mark.parametrize("name", ["Trainer", "Module", "DataModule"])
def test_what_is_lightnings_now_names_the_line(name: str) -> None:
    with pytest.raises(nbtrain.errors.UsageError, match=r"L\.Trainer\(strategy='nbtrain_ddp', devices=4\) for Trainer"):
        getattr(nbtrain, name)
    with pytest.raises(nbtrain.errors.UsageError, match=r"lightning\.pytorch\.callbacks for callbacks"):
        import_module("nbtrain.annexes.frameworks.no_trainer.callbacks")


@pytest.mark.parametrize("name", sorted(ON_A_RANK))
def test_a_name_of_the_ranks_says_where_it_exists(name: str) -> None:
    with pytest.raises(nbtrain.errors.UsageError, match=f"nbtrain.{name} exists on the ranks only"):
        getattr(nbtrain, name)


def test_importing_loads_the_standard_library_only() -> None:
    told = in_fresh_python(
        "import sys, os, signal, threading; env, path = dict(os.environ), list(sys.path)\n"
        "finders, hooks, builtin = list(sys.meta_path), list(sys.path_hooks), set(dir(__builtins__))\n"
        "old = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]\n"
        "import nbtrain\n"
        "assert dict(os.environ) == env, 'the environment has changed'\n"
        "assert sys.path == path, 'sys.path has changed'\n"
        "assert (sys.meta_path, sys.path_hooks) == (finders, hooks), 'imports are watched'\n"
        "assert set(dir(__builtins__)) == builtin, 'a builtin was set'\n"
        "assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == old, 'a signal handler was set'\n"
        "assert threading.active_count() == 1, 'a thread was started'\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert ast.literal_eval(told) == []


def test_what_a_strategy_needs_is_known_without_torch() -> None:
    told = in_fresh_python(
        "import sys; from nbtrain.machine import registry\n"
        "assert registry.strategies()['ddp'].needs is not None\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert ast.literal_eval(told) == []


@pytest.mark.slow
def test_star_import_takes_nothing_from_the_notebook() -> None:
    told = in_fresh_python("from nbtrain import *; print(sorted(n for n in globals() if not n.startswith('__')))")
    assert ast.literal_eval(told) == sorted(PUBLIC - {"__version__"})
