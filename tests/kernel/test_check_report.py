"""`check` in a notebook."""

from __future__ import annotations

from tests.support.hygiene import GRACE, gone_within
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook


def test_in_a_notebook(shared_kernel: Kernel) -> None:
    notebook = Notebook(shared_kernel, "")
    notebook(
        "import threading, sys, logging\nclass Odd: pass\nodd = Odd()\nh = logging.StreamHandler()\nip = get_ipython()"
    )
    notebook("%%time\nodd.tricks = {\n    'guard': threading.Lock(),\n}")
    shown = notebook("%distributed check odd, h").stdout
    assert "odd.tricks['guard'] (_thread.lock) cannot travel" in shown
    assert "line 3: 'guard': threading.Lock()," in shown
    assert (
        notebook("import nbtrain; bool(nbtrain.check('odd')), bool(nbtrain.check('h', 'ip'))").value == "(False, True)"
    )
    assert "write odd" in notebook.refused("%distributed check odd.tricks")
    assert "did you mean 'odd'" in notebook.refused("%distributed check od")
    assert shared_kernel.complete("%distributed check o") == ["odd"]
    assert shared_kernel.complete("%distributed check odd,h") == ["odd,h"]
    assert not notebook.running()
    notebook("%distributed stop")


def test_stop_while_it_is_tried_leaves_no_process_behind(shared_kernel: Kernel) -> None:
    notebook = Notebook(shared_kernel, "")
    notebook("""
class Slow:
    def __getstate__(self): return {'n': 1}
    def __setstate__(self, state):
        import time
        time.sleep(1000)
slow = Slow()""")
    before = {process.pid for process in shared_kernel.children()}
    waiting = shared_kernel.start("%distributed check slow")
    shared_kernel.wait_for(lambda: "trying in another process" in waiting.stdout)
    shared_kernel.wait_for(lambda: len({process.pid for process in shared_kernel.children()} - before) == 1, 10)
    shared_kernel.interrupt()
    shared_kernel.wait(waiting, 10)
    assert waiting.error is not None
    assert waiting.error.ename == "KeyboardInterrupt"
    assert gone_within(GRACE, lambda: [str(p.pid) for p in shared_kernel.children() if p.pid not in before]) == []
