"""What a cell's reader sees: text, displays, figures and tracebacks, in order, whatever wrote them on a rank."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def ready(module_kernel: Kernel) -> Notebook:
    made = Notebook(module_kernel)
    made("%distributed start --devices 2")
    return made


@pytest.fixture
def notebook(ready: Notebook) -> Notebook:
    return ready


QUIET = "%%distributed --devices 2 --monitor off\n"


def test_text_and_displays_come_in_the_order_in_which_they_were_made(notebook: Notebook) -> None:
    result = notebook(
        QUIET
        + """
import sys
print('one')
display('two')
print('three', file=sys.stderr)
print('four')
display({'text/plain': 'five'}, raw=True)
'six'"""
    )
    kinds = [out["type"] for out in result.outputs]
    assert kinds == ["stream", "display_data", "stream", "stream", "display_data", "display_data"], result.outputs
    assert result.text.split() == ["one", "'two'", "three", "four", "five", "'six'"]
    assert result.stderr == "three\n"


def test_c_libraries_and_subprocesses_are_heard(notebook: Notebook) -> None:
    result = notebook(
        QUIET
        + """
import ctypes, os, subprocess
libc = ctypes.CDLL(None)
if rank == 0:
    libc.puts(b'from C'); libc.fflush(None)
    os.system('echo from system; echo complaint >&2')
    subprocess.run(['echo', 'from run'])
    found = !echo captured
    assert found == ['captured'], found
    !echo from the bang
    libc.puts(b'unflushed')"""
    )
    lines = result.stdout.splitlines()
    for text in ("from C", "from system", "from run", "from the bang", "unflushed"):
        assert text in lines
    assert "captured" not in result.stdout
    assert result.stderr == "complaint\n"


def test_loader_workers_are_heard(notebook: Notebook) -> None:
    """They are forks of a rank. What they hold on to, as logging does, speaks too; what they display is left out."""
    notebook("""
import logging, sys
class Talking(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        print('item', i)
        print('no end of line', end='')
        display(i)
        logging.getLogger('mine').warning('warned %d', i)
        return i""")
    result = notebook(
        QUIET
        + """
handler = logging.StreamHandler(sys.stderr)
logging.getLogger('mine').addHandler(handler); logging.getLogger('mine').propagate = False
print('said by the rank')
for x in DataLoader(Talking(), num_workers=2, batch_size=2):
    pass
logging.getLogger('mine').removeHandler(handler); del handler
barrier()
print('said at the end')"""
    )
    assert result.stdout.count("item ") == 4, result.stdout  # rank 0's half of the eight
    assert result.stderr.count("warned ") == 4, result.stderr
    assert result.stdout.count("no end of line") == 4
    assert result.stdout.count("said by the rank") == result.stdout.count("said at the end") == 1
    assert all("printed something different" in data["text/plain"] for data in result.displays)


def test_megabytes_do_not_block(notebook: Notebook) -> None:
    result = notebook(
        QUIET
        + """
import os
if rank == 0:
    for i in range(500):
        print('x' * 9_999)
    os.write(1, b'y' * 1_000_000)
barrier()"""
    )
    assert result.stdout.count("x") == 500 * 9_999
    assert result.stdout.count("y") == 1_000_000


def test_a_progress_bar_stays_one_line(notebook: Notebook) -> None:
    result = notebook(
        QUIET
        + """
from tqdm import tqdm
for _ in tqdm(range(20), desc='epoch'):
    pass"""
    )
    assert "\repoch: 100%" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "otherwise" not in result.text


def test_figures(notebook: Notebook) -> None:
    notebook("import matplotlib.pyplot as plt")
    result = notebook(
        QUIET
        + """
print('above')
plt.plot([1, 2, 3]); plt.title(f'rank {rank}')
plt.show()
print('between')
figure, axes = plt.subplots(); axes.plot([3, 1]);"""
    )
    assert [("image/png" in data) for data in result.displays] == [True, True]
    assert result.text.index("above") < result.text.index("<Figure") < result.text.index("between")
    (shown,) = notebook("assert axes.figure is figure and figure.axes[0] is axes\nfigure").displays
    assert "image/png" in shown


def test_the_last_expression(notebook: Notebook) -> None:
    assert notebook(QUIET + "6 * 7").displays == [{"text/plain": "42"}]
    assert notebook(QUIET + "6 * 7;").displays == []
    assert notebook(QUIET + "6 * 7; # hidden\n").displays == []
    assert notebook(QUIET + "x = 1\nNone").displays == []


def test_rich_displays_and_their_updates(notebook: Notebook) -> None:
    result = notebook(
        QUIET
        + """
from IPython.display import HTML, display, update_display
display(HTML('<b>bold</b>'))
display('first', display_id='status')
handle = display('mine', display_id=True)
update_display('last', display_id='status')
handle.update('yours')"""
    )
    assert [data.get("text/html") for data in result.displays] == ["<b>bold</b>", None, None]
    assert [data["text/plain"] for data in result.displays[1:]] == ["'last'", "'yours'"]


def test_what_other_ranks_say_differently_is_folded(notebook: Notebook) -> None:
    result = notebook(QUIET + "print('the same')\nif rank == 1: print('I am the other <one>')")
    assert result.stdout == "the same\n"
    (folded,) = result.displays
    assert folded["text/plain"].startswith("rank 1 printed something different (1 line): I am the other <one>")
    assert "&lt;one&gt;" in folded["text/html"]
    assert "the same" not in folded["text/html"]
    assert notebook(QUIET + "print('the same')").displays == []


def test_output_all_and_files(notebook: Notebook) -> None:
    result = notebook(QUIET.replace("\n", " --output all\n") + "print('I am', rank); print('and done')\nrank * 10")
    lines = result.stdout.splitlines()
    for rank in (0, 1):
        assert f"[rank {rank}] I am {rank}" in lines
        assert f"[rank {rank}] and done" in lines
    assert sorted(data["text/plain"] for data in result.displays) == ["0", "10"]
    result = notebook(QUIET.replace("\n", " --output files\n") + "print('I am', rank)")
    assert result.stdout.startswith("I am 0\n")
    assert "nbtrain-output/rank0.txt" in result.stdout
    folder = notebook.kernel.home / "nbtrain-output"
    assert [(folder / f"rank{rank}.txt").read_text() for rank in (0, 1)] == ["I am 0\n", "I am 1\n"]
    notebook(QUIET.replace("\n", " --output files\n") + "print('again', rank)")
    assert (folder / "rank1.txt").read_text() == "again 1\n"  # of the last run, as the notebook shows it
