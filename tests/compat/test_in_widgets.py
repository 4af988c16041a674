"""What nbtrain/compat relies on in ipywidgets, and in libraries that pick a progress bar."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tests.support.kernels import Kernel


def _mirrors() -> None:
    from typing import Any

    import ipywidgets

    from nbtrain.compat import widgets

    assert widgets.in_notebook()
    bar = ipywidgets.FloatProgress(value=2, max=8)
    state: dict[str, Any] = bar.get_state()
    mirror = widgets.mirror("0123456789abcdef", {**state, "data": None}, [["data"]], [b"bytes"])
    assert mirror.model_id == "0123456789abcdef"
    mirror.pass_on({"method": "update", "state": {"value": 5.0}, "buffer_paths": []}, ())
    mirror.pass_on({"method": "custom", "content": {}}, ())
    known = ipywidgets.Widget.get_manager_state()["state"]
    found = known["0123456789abcdef"]
    assert found["model_name"] == "FloatProgressModel"
    assert found["model_module"] == state["_model_module"]
    assert found["state"] == {**state, "value": 5.0}
    assert [buffer["path"] for buffer in found["buffers"]] == [["data"]]
    mirror.set_state({"value": 6.0})
    assert mirror.get_state()["value"] == 6.0
    mirror.close()
    assert "0123456789abcdef" not in ipywidgets.Widget.get_manager_state()["state"]


@pytest.mark.kernel
def test_a_mirror_is_told_to_a_page_that_is_loaded_again(shared_kernel: Kernel) -> None:
    shown = shared_kernel.run(inspect.getsource(_mirrors) + "_mirrors()")
    assert shown.error is None, shown.text
    assert "0123456789abcdef" not in shown.models, "it was closed there, too"


def _picks(notebook: bool, terminal: bool = False) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    from nbtrain.compat import widgets

    assert widgets.there_are_widgets()
    assert not widgets.in_notebook()
    config = Config()
    if notebook:
        widgets.as_in_notebook(config)
    if terminal:
        widgets.as_in_terminal(config)
    InteractiveShell.instance(config=config)
    import tqdm.auto
    import tqdm.notebook

    print(issubclass(tqdm.auto.tqdm, tqdm.notebook.tqdm))


@pytest.mark.parametrize(("notebook", "terminal"), [(True, False), (False, False), (True, True)])
def test_tqdm_picks_the_bar_of_a_notebook(notebook: bool, terminal: bool) -> None:
    code = f"{inspect.getsource(_picks)}\n_picks({notebook}, {terminal})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == f"{notebook and not terminal}\n", found.stderr
