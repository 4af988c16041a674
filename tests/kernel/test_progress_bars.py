"""Progress bars in a cell of ranks: rank 0's are drawn as plain Jupyter draws them, the others' are silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kernels import VIEW, Kernel, Result
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.thorough]

CELL = "%%distributed --devices 2\n"
IMPORTS = """
import time
from tqdm import tqdm as text_bar
from tqdm.auto import tqdm, trange
from tqdm.notebook import tqdm as notebook_bar
"""


@pytest.fixture(scope="module")
def ready(module_kernel: Kernel) -> Notebook:
    made = Notebook(module_kernel)
    made(IMPORTS)
    made("%distributed start --devices 2")
    return made


@pytest.fixture
def notebook(ready: Notebook) -> Notebook:
    return ready


def kinds(result: Result) -> list[str]:
    return [out["type"] if out["type"] != "stream" else out["name"] for out in result.outputs]


def test_the_first_line_and_the_dashboard_stand_above_all_that_is_printed(notebook: Notebook) -> None:
    result = notebook(
        CELL
        + """
for i in text_bar(range(3), desc='text'):
    print('print', i)
    time.sleep(0.9)"""
    )
    first, *below = kinds(result)
    assert first == "display_data"
    assert set(below) == {"stdout", "stderr"}, "the dashboard is in the middle"
    assert result.updates, "it took three seconds: there was a dashboard"
    (saved,) = result.displays
    assert saved["text/plain"].startswith("ddp · 2 ranks · cpu\ndone · 0:0")
    assert "ddp · 2 ranks · cpu" in saved["text/html"]
    assert result.stdout == "print 0\nprint 1\nprint 2\n"
    assert result.stderr.startswith("\rtext:   0%|")
    assert "\rtext: 100%|██████████| 3/3" in result.stderr


def test_bars_of_a_notebook_are_its_widgets(notebook: Notebook) -> None:
    """Nested, with a postfix, with prints in the middle; the same cell again gives the same."""
    cell = (
        CELL
        + """
for epoch in trange(2, desc='epochs'):
    inner = tqdm(range(5), desc='batches', leave=False)
    for i in inner:
        inner.set_postfix(loss=i / 2)
    tqdm.write(f'epoch {epoch} is over')
    print('printed')
for _ in notebook_bar(range(4)): pass
'text' if rank else None"""
    )
    for result in (notebook(cell), notebook(cell)):
        assert result.stderr == ""
        assert result.bars == [(2, 2, "success"), (4, 4, "success")], "the inner ones are gone"
        assert result.stdout.splitlines() == ["epoch 0 is over", "printed", "epoch 1 is over", "printed"]
        (*_, bar) = [data for data in result.displays if VIEW in data]
        assert bar["text/plain"].startswith("  0%|          | 0/4 ["), "what a page without widgets shows"


def test_an_iteration_costs_no_message(notebook: Notebook) -> None:
    result = notebook(CELL + "for _ in tqdm(range(300_000)): pass")
    assert result.bars == [(300_000, 300_000, "success")]
    assert result.widget_messages < 60, "eleven open the bar; then ten times a second what tqdm says"
    result = notebook(
        CELL
        + """
import ipywidgets
by_hand = ipywidgets.IntProgress(max=5000)
display(by_hand)
for _ in range(5000): by_hand.value += 1"""
    )
    assert result.bars == [(5000, 5000, "")]
    assert result.widget_messages < 60, "one for each flush of the rank's output"
    assert notebook(CELL + "by_hand.max = 6000").error is None, "it goes on in the next cell"
    shown = notebook(KNOWN)
    assert shown.value == "[6000]", "what a page that is loaded again gets"


def test_output_all_shows_every_ranks_bar(notebook: Notebook) -> None:
    result = notebook(CELL.replace("\n", " --output all\n") + "for _ in tqdm(range(5)): pass")
    assert result.bars == [(5, 5, "success")] * 2


KNOWN = """
import ipywidgets
known = ipywidgets.Widget.get_manager_state()['state'].values()
[one['state']['max'] for one in known if one['model_name'] == 'IntProgressModel']"""

FAILS = """
for _ in tqdm(range(2), desc='outer'):
    for i in tqdm(range(100), desc='inner'):
        if i == 3: raise ValueError('no')"""


def test_bars_of_a_cell_that_fails_are_red(notebook: Notebook) -> None:
    result = notebook.kernel.run(CELL + FAILS)
    assert result.error is not None
    assert [(most, style) for _, most, style in result.bars] == [(2, "danger"), (100, "danger")]
    assert notebook(CELL + "for _ in tqdm(range(5)): pass").bars == [(5, 5, "success")]


def test_bars_of_a_cell_that_is_stopped_are_red(notebook: Notebook) -> None:
    result = notebook.kernel.start(
        CELL
        + """
print('started')
for _ in tqdm(range(2)):
    for i in tqdm(range(1000)): time.sleep(0.02)"""
    )
    notebook.kernel.wait_for(lambda: "started" in result.stdout and len(result.bars) == 2, 20)
    notebook.kernel.interrupt()
    notebook.kernel.wait(result)
    assert result.error is not None
    assert [(most, style) for _, most, style in result.bars] == [(2, "danger"), (1000, "danger")]


def test_clear_output_leaves_the_dashboard(notebook: Notebook) -> None:
    result = notebook(
        CELL
        + """
from IPython.display import clear_output
for i in range(25):
    clear_output(wait=True)
    print('now', i)
    time.sleep(0.1)"""
    )
    assert kinds(result) == ["display_data", "stdout"]
    assert "text/html" in result.displays[0], "the picture of the run, although its first place was cleared"
    assert result.stdout == "now 24\n"


def test_a_run_in_the_background(notebook: Notebook) -> None:
    result = notebook.kernel.run(
        "%%distributed --devices 2 --background\nfor _ in tqdm(range(30)): time.sleep(0.1)\nprint('over')"
    )
    notebook.kernel.wait_for(lambda: "over" in result.stdout, 20)
    notebook("import nbtrain\nnbtrain.background().wait()")
    assert result.bars == [(30, 30, "success")]
    shown = [out["data"] for out in result.outputs if out["type"] == "display_data"]
    assert [VIEW in data for data in shown] == [False, True], "the run's first line or what took its place, the bar"


@pytest.mark.thorough
def test_without_ipywidgets_bars_are_text(kernel_factory: Callable[..., Kernel], tmp_path: Path) -> None:
    (tmp_path / "ipywidgets.py").write_text("raise ImportError('not installed')")
    notebook = Notebook(kernel_factory(PYTHONPATH=str(tmp_path)))
    result = notebook(CELL + "from tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='text'): pass")
    assert result.widget_messages == 0
    assert "\rtext: 100%|██████████| 3/3" in result.stderr
