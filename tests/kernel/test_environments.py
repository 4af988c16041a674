"""Where people are: with the IPython, ipykernel and widgets of Colab, of Kaggle and of older and newer notebooks.

`make environments` makes them (.ci/environments). nbtrain comes into each as it comes to its users: as a wheel, with
pip free to change what is there. A kernel of that environment then does what a notebook does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.absent import absent
from tests.support.kernels import ROOT, Kernel, running_kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

MADE = ROOT / "build" / "environments"
NAMES = sorted(path.stem for path in (ROOT / "tests" / "environments").glob("*.txt"))
SIGNS = {"colab": {"COLAB_RELEASE_TAG": "release"}, "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}}
"""by which nbtrain tells where it is"""
CELL = "%%distributed --strategy ddp --devices 2 --split-batches "

pytestmark = [pytest.mark.kernel, pytest.mark.slow, pytest.mark.thorough]


@dataclass(frozen=True)
class Environment:
    name: str
    folder: Path
    before: frozenset[str]
    """what pip found there"""
    after: frozenset[str]
    """and once it had installed nbtrain"""

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


def pip(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any((MADE / name / "made").is_file() for name in NAMES):
        absent("the environments of Colab, Kaggle and others are not made", "make environments")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    pinned = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}  # of what builds it
    done = subprocess.run(command, env=os.environ | pinned, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=NAMES)
def environment(request: pytest.FixtureRequest, wheel: Path) -> Iterator[Environment]:
    folder = MADE / request.param
    if not (folder / "made").is_file():
        absent(f"the environment {request.param} is not made", "make environments")
    pip(folder, "uninstall", "--yes", "nbtrain")
    before = pip(folder, "freeze").splitlines()
    pip(folder, "install", str(wheel))
    after = pip(folder, "freeze").splitlines()
    yield Environment(request.param, folder, frozenset(before), frozenset(after))
    pip(folder, "uninstall", "--yes", *(line.partition("==")[0].partition(" @")[0] for line in {*after} - {*before}))


@pytest.fixture(scope="module")
def module_kernel(environment: Environment) -> Iterator[Kernel]:
    """A kernel of that environment, which sees the wheel and not this checkout."""
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    signs = SIGNS.get(environment.name, {})
    with running_kernel(python=environment.python, PYTHONPATH="", PATH=path, **signs) as found:
        yield found


@pytest.fixture(scope="module")
def ready(module_kernel: Kernel) -> Notebook:
    notebook = Notebook(module_kernel)
    notebook(CELL + "\npass")
    return notebook


def aware(notebook: Notebook) -> None:
    """An older kernel lets go of the cells that it finds waiting for a moment after an error."""
    notebook.kernel.wait_for(lambda: notebook.kernel.run("'yes'").value)


@pytest.fixture
def notebook(ready: Notebook) -> Notebook:
    ready("torch.manual_seed(0); " + TRAIN)
    return ready


def test_installing_nbtrain_changes_nothing_that_is_there(environment: Environment) -> None:
    assert environment.before <= environment.after
    came = {line.partition("==")[0].partition(" @")[0] for line in environment.after - environment.before}
    # Colab's IPython asks for jedi, which Colab leaves out: pip adds it, whatever is installed there.
    assert came == {"nbtrain"} | ({"jedi"} if environment.name == "colab" else set())


def test_it_is_what_was_installed_that_runs(environment: Environment, notebook: Notebook) -> None:
    shown = notebook("import nbtrain; print(nbtrain.__file__)\n%distributed doctor").stdout.splitlines()
    assert Path(shown[0]).is_relative_to(environment.folder)
    pins = (ROOT / "tests" / "environments" / f"{environment.name}.txt").read_text().splitlines()
    (kernel,) = (line.replace("==", " ") for line in pins if line.startswith("ipykernel=="))
    assert any(f", {kernel}," in line for line in shown), shown
    assert "nothing stands in the way" in shown[-1]
    assert any(line.split()[:2] == ["here", f"{environment.name.capitalize()},"] for line in shown) == (
        environment.name in SIGNS
    )


def test_replies_do_not_pass_by_the_stream_that_reads_requests(notebook: Notebook) -> None:
    """ipykernel 7.0 to 7.3 have a socket there, and miss a cell in some hundred."""
    notebook("kernel = get_ipython().kernel; thread = getattr(kernel, 'shell_channel_thread', None)")
    socket = "getattr(getattr(thread, '_manager', None), '_shell_socket', kernel.shell_stream)"
    assert notebook(f"{socket} is kernel.shell_stream").value == "True"


def test_a_cell_trains_and_the_weights_come_home(notebook: Notebook) -> None:
    notebook("import copy; alone = copy.deepcopy((model, opt)); state = torch.get_rng_state()")
    shown = notebook(CELL + LOOP + "print('heard', rank)\nlast = loss.item()\ndisplay({'a': rank})")
    assert "heard 0" in shown.stdout
    assert {"text/plain": "{'a': 0}"} in shown.displays
    assert (
        notebook("isinstance(last, float), bool((model[0].weight != alone[0][0].weight).any())").value == "(True, True)"
    )
    notebook("torch.set_rng_state(state)" + LOOP.replace("model", "alone[0]").replace("opt.", "alone[1]."))
    far = "max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone[0].parameters()))"
    assert float(notebook(far).value or "inf") < 1e-5, "not what one process makes of it"


def test_html_that_is_replaced(notebook: Notebook) -> None:
    shown = notebook(CELL + "--monitor html\nimport time\n" + LOOP + "    time.sleep(0.5)")
    (table,) = [data for data in shown.displays if "steps/s" in data.get("text/plain", "")]
    assert "text/html" in table
    assert len(shown.updates) > 1


def test_a_widget(notebook: Notebook) -> None:
    cell = notebook.kernel.start(CELL + "--monitor widget\nimport time\n" + LOOP + "    time.sleep(0.2)")
    notebook.kernel.wait_for(lambda: any("application/vnd.jupyter.widget-view+json" in data for data in cell.displays))
    assert notebook.kernel.wait(cell).error is None, cell.text
    (table,) = [data for data in cell.displays if "steps/s" in data.get("text/plain", "")]
    assert "image/svg+xml" in table or "text/html" in table, "what is seen without a kernel"


def test_lines_of_text_and_stop(notebook: Notebook) -> None:
    notebook("before = model[0].weight.detach().clone()")
    cell = notebook.kernel.start(CELL + "--monitor text\nwhile True:" + LOOP.replace("\n", "\n    "))
    notebook.kernel.wait_for(lambda: "steps/s" in cell.stdout)
    notebook.kernel.interrupt()
    error = notebook.kernel.wait(cell, timeout=20).error
    assert error is not None
    assert error.ename == "KeyboardInterrupt"
    assert "stopped after step" in error.evalue
    assert not cell.displays
    aware(notebook)
    assert notebook("bool((model[0].weight != before).any())").value == "True"
    notebook(CELL + LOOP)


def test_completion(notebook: Notebook) -> None:
    assert sorted(notebook.kernel.complete("%%distributed --st")) == ["--start", "--steps", "--strategy"]
    assert "fsdp" in notebook.kernel.complete("%%distributed --strategy f")
    assert "status" in notebook.kernel.complete("%distributed st")


def test_errors_show_the_readers_own_lines(notebook: Notebook) -> None:
    error = notebook.fails(CELL + "\ndef half(x):\n    return x / 0\n\nhalf(1)")
    assert error.ename == "ZeroDivisionError"
    assert "return x / 0" in error.traceback
    assert "half(1)" in error.traceback
    assert "site-packages/nbtrain" not in error.traceback
    aware(notebook)
    error = notebook.fails(CELL + "\nx = 1\nif x\n    pass")
    assert error.ename.endswith("SyntaxError")
    assert "if x" in error.traceback
    assert "line 3" in error.traceback
    aware(notebook)
    assert "did you mean ddp?" in notebook.refused("%%distributed --strategy ddb\npass")


PICK = """import nbtrain
form = nbtrain.picker(devices=2)
display(form)
"""
ASKED = "form._view._hear(form._view, {}, [])"
"""what the page says when something on it is pressed"""


def test_the_picker(notebook: Notebook) -> None:
    shown = notebook("%distributed pick -d 2")
    assert ["application/vnd.jupyter.widget-view+json" in data for data in shown.displays] == [True]
    assert "application/vnd.jupyter.widget-view+json" in notebook(PICK).displays[0]
    notebook(ASKED.format({"kind": "take", "line": "--strategy fsdp"}))
    notebook(ASKED.format({"kind": "use"}))
    assert notebook("form.line").value == "'--strategy fsdp --devices 2'"
    assert "--strategy fsdp --devices 2" in notebook("%distributed").stdout
    notebook("%distributed --strategy auto")
    notebook(CELL + LOOP)
    notebook(ASKED.format({"kind": "measure", "names": ["ddp", "zero1"]}), timeout=120)
    assert notebook("[row['state'] for row in form._choice.data()['compared']['rows']]").value == "['done', 'done']"
