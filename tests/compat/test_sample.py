"""A sample of everything, on real ranks, with whatever torch is installed: each strategy against one process, half
precision, checkpoints, Stop, errors, `torch.compile`, the plan, and what is shown of a run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.support.absent import absent
from tests.support.alike import ACCURACY, ALONE, CAME_HOME, FAR, RANKS, TRAINING, WAYS, trains_as_one_process
from tests.support.kernels import running_kernel
from tests.support.notebook import LOOP, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(300)]


class Kernels:
    """One kernel for all tests, and another once a test has left it busy: so a version that hangs under one strategy
    is told from one that hangs."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._now: Notebook | None = None

    def notebook(self) -> Notebook:
        if self._now is not None:
            try:
                self._now.kernel.run("pass", timeout=5)
            except (TimeoutError, RuntimeError):
                self.close()
        if self._now is None:
            # With a directory of its own for what a pool keeps there, which outlives a test.
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            self._now = Notebook(self._stack.enter_context(running_kernel(XDG_RUNTIME_DIR=folder)))
        return self._now

    def close(self) -> None:
        self._now = None
        self._stack.close()


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    with ExitStack() as stack:
        made = Kernels(stack)
        made.notebook()  # before any test: it is not theirs
        yield made


@pytest.fixture
def notebook(kernels: Kernels) -> Notebook:
    """With a model, and a copy of it that one process trains."""
    made = kernels.notebook()
    made(TRAINING)
    return made


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_comes_home_as_one_process_would_have_trained_it(notebook: Notebook, way: str) -> None:
    strategy = way.split()[0]
    for package in registry.strategy(strategy).needs.packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {strategy} is left out")
    trains_as_one_process(notebook, way)


@pytest.mark.sample("fsdp-*")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_half_precision(notebook: Notebook, strategy: str, precision: str) -> None:
    """Weights and gradients stay in 32 bits; a batch is rounded as it is in one process, but for a digit or two."""
    notebook(TRAINING.replace("AdamW", "SGD").replace("0.01", "0.1"))
    seen = "kinds = set()\nfirst_layer = model[0].register_forward_hook(lambda m, i, o: kinds.add(str(o.dtype)))\n"
    notebook(f"%%distributed --strategy {strategy} --precision {precision} {RANKS}\n{seen}{LOOP}\nfirst_layer.remove()")
    assert notebook("kinds").value == str({"torch.bfloat16" if "bf" in precision else "torch.float16"})
    notebook("assert all(p.dtype == torch.float32 for p in model.parameters())")
    notebook(ALONE)
    assert 0 < float(notebook(FAR).value or "inf") < 5e-3


def test_a_checkpoint_of_one_strategy_is_loaded_under_another(notebook: Notebook) -> None:
    notebook(f"%%distributed --strategy ddp {RANKS}\n{LOOP}\nsave('best')")
    notebook("alone = copy.deepcopy((model, opt))\nfor p in model.parameters(): nn.init.zeros_(p)")
    notebook("for held in opt.state.values(): held['exp_avg'].zero_(); held['step'].zero_()")
    notebook(f"%%distributed --strategy fsdp {RANKS}\nload('best', model, opt)")
    assert float(notebook(FAR).value or "inf") == 0
    notebook(CAME_HOME)
    notebook(f"%%distributed --strategy fsdp {RANKS}\n{LOOP}")
    notebook(ALONE)
    assert float(notebook(FAR).value or "inf") < ACCURACY


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stop(notebook: Notebook, strategy: str) -> None:
    endless = "while True:" + LOOP.replace("\n", "\n    ")
    cell = notebook.kernel.start(f"%%distributed --strategy {strategy} {RANKS} --monitor text\n{endless}")
    notebook.kernel.wait_for(lambda: "steps/s" in cell.stdout)
    notebook.kernel.interrupt()
    error = notebook.kernel.wait(cell, timeout=20).error
    assert error.ename == "KeyboardInterrupt"
    assert "stopped after step" in error.evalue
    notebook("assert not torch.equal(model[0].weight, first[0].weight)")
    notebook(f"%%distributed {RANKS}\n{LOOP}")


def test_an_error_comes_with_its_line(notebook: Notebook) -> None:
    error = notebook.fails(f"%%distributed {RANKS}\ndef half(x):\n    return x / 0\n\nfor x, y in loader:\n    half(1)")
    assert error.ename == "ZeroDivisionError"
    assert "return x / 0" in error.traceback
    assert "half(1)" in error.traceback
    error = notebook.fails(f"%%distributed {RANKS}\nx = 1\nif x\n    pass")
    assert error.ename.endswith("SyntaxError")
    assert "line 3" in error.traceback
    notebook(f"%%distributed {RANKS}\n{LOOP}")
    notebook(ALONE)
    assert float(notebook(FAR).value or "inf") < ACCURACY


@pytest.mark.thorough
def test_a_compiled_model(notebook: Notebook) -> None:
    if shutil.which("g++") is None:
        absent("no C++ compiler", "apt-get install g++")
    notebook("own_model = model")
    notebook(f"%%distributed --strategy ddp {RANKS}\nmodel = torch.compile(model)\n{LOOP}", timeout=240)
    notebook("assert model._orig_mod is own_model and type(model) is not type(own_model)")
    notebook(ALONE)
    assert float(notebook("model = own_model\n" + FAR).value or "inf") < ACCURACY


@pytest.mark.thorough
def test_the_plan_has_a_row_for_every_strategy(notebook: Notebook) -> None:
    shown = notebook("%distributed plan --devices 2").text
    assert "peak per rank" in shown
    assert "★" in shown
    rows = {line.lstrip("★ ").split()[0] for line in shown.splitlines() if line.strip("★ ")}
    assert {"ddp", "zero1", "fsdp", "pipeline"} <= rows
    status = notebook("%distributed strategies").text
    assert all(name in status for name in registry.STRATEGIES)
    doctor = notebook("%distributed doctor").stdout
    assert not [line for line in doctor.splitlines() if line.startswith("✗")], doctor


@pytest.mark.thorough
def test_what_is_shown_of_a_run(notebook: Notebook) -> None:
    slow = "import time\n" + LOOP + "    time.sleep(0.5)"
    shown = notebook(f"%%distributed {RANKS} --monitor html\n{slow}")
    (table,) = [data for data in shown.displays if "steps/s" in data.get("text/plain", "")]
    assert "<" in table["text/html"]
    assert len(shown.updates) > 1
    assert "steps/s" in notebook(f"%%distributed {RANKS} --monitor text\n{slow}").stdout
    cell = notebook.kernel.start(f"%%distributed {RANKS} --monitor widget\n{slow}")
    notebook.kernel.wait_for(lambda: any("application/vnd.jupyter.widget-view+json" in data for data in cell.displays))
    assert notebook.kernel.wait(cell).error is None, cell.text
    (table,) = [data for data in cell.displays if "steps/s" in data.get("text/plain", "")]
    assert "image/svg+xml" in table or "text/html" in table, "what is seen when the kernel is gone"
    status = notebook("%distributed status").stdout
    assert status.startswith("2 ranks")
    assert "rank 1: cpu" in status
