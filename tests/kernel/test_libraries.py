"""Libraries that bring their own distribution: refused beside a strategy that distributes, right under none if they are
made on the ranks. What stands in for them has their modules and names; nothing is installed for it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.compat import training_libraries
from nbtrain.compat.intercept import Listeners
from tests.support.kernels import ROOT, Kernel, running_kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.thorough

CLASS = """
class {name}:
    def __init__(self, *args, **kwargs): self.args = args
    def {uses}(self, *args): return "trained"
"""
LAUNCHERS = """
def notebook_launcher(function, args=(), num_processes=None): return function(*args)
def debug_launcher(function, args=(), num_processes=2): return function(*args)
"""
SETTINGS = """
class TrainingArguments:
    def __init__(self):
        import torch.distributed as dist
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module for each of them, as in `compat.training_libraries`."""
    root = tmp_path_factory.mktemp("libraries")
    for one in training_libraries.CLASSES:
        file = root / f"{one.module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CLASS.format(name=one.name, uses=one.uses[0]))
        for folder in (one for one in file.parents if root in one.parents):
            (folder / "__init__.py").touch()
    (root / "accelerate/launchers.py").write_text(LAUNCHERS)
    (root / "accelerate/__init__.py").write_text("from .launchers import debug_launcher, notebook_launcher\n")
    (root / "transformers/training_args.py").write_text(SETTINGS)
    return root


@pytest.fixture(scope="module")
def kernel_with_libraries(libraries: Path) -> Iterator[Kernel]:
    with running_kernel(PYTHONPATH=f"{ROOT}:{libraries}") as kernel:
        yield kernel


@pytest.fixture
def notebook(kernel_with_libraries: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(kernel_with_libraries, "")
    yield notebook
    notebook("%distributed stop")


def cell(one: training_libraries.ProcessAware) -> str:
    return f"from {one.module} import {one.name}\nmade = {one.name}()\n"


@pytest.mark.sample(first=2)
@pytest.mark.parametrize("one", training_libraries.CLASSES, ids=lambda one: one.path)
def test_a_library_that_distributes(notebook: Notebook, one: training_libraries.ProcessAware) -> None:
    use = f"print(made.{one.uses[0]}())"
    notebook("import sys\nmade = None")
    for strategy in ("ddp", "fsdp"):  # the cell imports it, and then it is there
        error = notebook.fails(f"%%distributed -s {strategy} -d 2\n{cell(one)}{use}")
        assert error.ename == "NotSupported"
        assert error.evalue.startswith(f"{one.word} distributes the training by itself, and so does -s {strategy}:")
        assert "Write %%distributed -s none above this cell" in error.evalue
    assert "trained" in notebook(f"%%distributed -s none -d 2\n{cell(one)}{use}").stdout
    assert "trained" in notebook(f"%%distributed -s none -d 2\n{use}").stdout, "of an earlier cell"
    notebook(cell(one))
    error = notebook.fails(f"%%distributed -s none -d 2\n{use}")
    assert error.evalue.startswith(f"{one.word} was made where there is one process")
    assert "trained" in notebook(f"%%distributed -s single -d 1\n{use}").stdout


@pytest.mark.thorough
def test_settings_that_have_counted_processes_in_the_notebook(notebook: Notebook) -> None:
    first = "from transformers.trainer import Trainer\nfrom transformers.training_args import TrainingArguments\n"
    notebook(f"{first}args = TrainingArguments()")
    error = notebook.fails("%%distributed -s none -d 2\nTrainer(None, args=args).train()")
    assert error.evalue.startswith("the TrainingArguments of transformers' Trainer was made where there is one process")
    notebook(f"%%distributed -s none -d 2\n{first}Trainer(None, args=TrainingArguments()).train()")


STARTS = {
    "notebook_launcher": (
        "from accelerate import notebook_launcher\nnotebook_launcher(main, (1,), 3)", 3, "main(*args)",
    ),
    "debug_launcher": ("import accelerate\naccelerate.debug_launcher(main)", 2, "main()"),
    "torch.multiprocessing.spawn": (
        "import torch.multiprocessing as mp\nmp.spawn(main, args=(1,), nprocs=4)", 4, "main(rank, *args)",
    ),
    "torch.multiprocessing": (
        "from torch.multiprocessing import start_processes\nstart_processes(main, nprocs=2, start_method='fork')", 2,
        "main(rank)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", STARTS)
@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_cell_that_starts_processes_is_told_what_to_write(notebook: Notebook, what: str, strategy: str) -> None:
    code, count, call = STARTS[what]
    error = notebook.fails(f"%%distributed -s {strategy} -d 2\ndef main(*args): pass\n{code}")
    assert (error.ename, error.evalue.startswith(what)) == ("NotSupported", True), error.evalue
    line = f"Write %%distributed -s none -d {count} above the cell, and in its place {call}"
    assert line in error.evalue.partition("\n")[0]


def test_deepspeed_initialize_is_refused_beside_a_strategy(notebook: Notebook) -> None:
    error = notebook.fails("%%distributed -s ddp -d 2\nimport deepspeed\ndeepspeed.initialize(model=None)", 120)
    assert "or leave it out and write -s deepspeed" in error.evalue


def test_who_waits_for_a_module_is_told_once_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import sys

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/__init__.py").write_text("from .launchers import notebook_launcher\n")
    (tmp_path / "accelerate/launchers.py").write_text(textwrap.dedent(LAUNCHERS))
    finders, before = list(sys.meta_path), set(sys.modules)
    paths = [f"{training_libraries.LAUNCHERS}.notebook_launcher"]

    def make(old: object) -> object:
        return lambda *args: "ours"

    here, gone = Listeners(), Listeners()
    try:
        for listeners in (here, gone):
            listeners.when_imported(training_libraries.LAUNCHERS, paths, "brought", lambda _: make)
        gone.close()
        accelerate = importlib.import_module("accelerate")
        assert accelerate.notebook_launcher(len) == "ours"
        assert vars(accelerate.launchers.__loader__).keys() == {"name", "path"}
        assert sys.meta_path == finders
        here.close()
        assert accelerate.launchers.notebook_launcher(dict) == {}
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    here.when_imported("nowhere.at.all", paths, "brought", lambda _: make)
    here.close()
    assert sys.meta_path == finders


@pytest.mark.thorough
def test_a_wrapper_around_an_optimizer_is_made_as_its_own_constructor_does(notebook: Notebook) -> None:
    """accelerate's calls no constructor of torch's. torch would patch its class for hooks that no other object has."""
    notebook("""
import torch
class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer): self.optimizer = optimizer
    param_groups = property(lambda self: self.optimizer.param_groups)
    def step(self): return self.optimizer.step()
wrapper = Wrapper(torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1))
""")
    notebook("%%distributed -s none -d 2\nwrapper.step()\nWrapper(wrapper.optimizer).step()")
