"""Internals of ipywidgets, and how libraries find out that there are widgets: tqdm's `auto`, transformers' Trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nbtrain.base.when_imported import before_import
from nbtrain.compat.internals import Internals

its = Internals("ipywidgets")

its.members("ipywidgets.widgets.widget", "_put_buffers")
its.members("ipywidgets.widgets.widget.Widget", "_model_name", "_model_module", "_model_module_version", "_send")
KERNEL, SHELL = "IPKernelApp", "ipykernel.zmqshell"
"""What libraries look for: the section of a kernel's configuration, and the module of its shell."""
CHOOSES = "tqdm.autonotebook"
"""the module that looks for it, once, and picks a bar"""


def in_notebook() -> bool:
    """Whether this process is a kernel whose cells show widgets."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return KERNEL in getattr(shell, "config", ()) and there_are_widgets()


def as_in_notebook(config: Any) -> None:
    """Libraries that are imported from here on find what they look for in a notebook. `config`: of the shell to be."""
    config[KERNEL] = type(config)()
    before_import(CHOOSES, partial(_import_shell, config))


def as_in_terminal(config: Any) -> None:
    """The reverse of it, for libraries that are still to be imported."""
    config.pop(KERNEL, None)


def _import_shell(config: Any) -> None:
    if KERNEL in config:
        with suppress(ImportError):  # on a machine without ipykernel bars are text
            import_module(SHELL)


@cache
def there_are_widgets() -> bool:
    """Whether ipywidgets is installed, in a version whose comms are not ipykernel's own."""
    try:
        return int(version("ipywidgets").partition(".")[0]) >= 8
    except (PackageNotFoundError, ValueError):
        return False


def mirror(model_id: str, state: Mapping[str, Any], paths: Sequence[Any], buffers: Sequence[bytes]) -> Any:
    """A widget of this process that has the state of one in another, and opens its half on the page. It knows nothing
    but this state, so it stands for any class. A page that is loaded again gets it from here."""
    return _mirror_class()(model_id, state, paths, buffers)


@cache
def _mirror_class() -> Any:
    from ipywidgets.widgets import widget

    class Mirror(widget.Widget):
        """Has the state that it is told."""

        def __init__(
            self, model_id: str, state: Mapping[str, Any], paths: Sequence[Any], buffers: Sequence[bytes]
        ) -> None:
            self.state: dict[str, Any] = {}
            self.learn(state, paths, buffers)
            super().__init__(model_id=model_id)

        def open(self) -> None:
            for name in ("_model_name", "_model_module", "_model_module_version"):
                self.set_trait(name, self.state[name])
            super().open()

        def learn(self, state: Mapping[str, Any], paths: Sequence[Any], buffers: Sequence[bytes]) -> None:
            told = dict(state)
            widget._put_buffers(told, paths, buffers)
            self.state.update(told)

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
            return dict(self.state)

        def set_state(self, sync_data: Mapping[str, Any]) -> None:
            """What the page has set."""
            self.state.update(sync_data)

        def pass_on(self, data: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
            """Say to the page what the other one has said, and remember what it has said of itself."""
            if data.get("method") == "update":
                self.learn(data["state"], data.get("buffer_paths", ()), buffers)
            self._send(dict(data), buffers=list(buffers) or None)

    return Mirror
