"""`check` in a notebook."""

from __future__ import annotations

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
