"""ipykernel, IPython, comm and ipywidgets: what a kernel keeps to itself. Each function does without where it is not
there: IPython 7.34 to 9.18, ipykernel 6.17 to 7.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbtrain.compat.internals import Internals

its = Internals("ipython")
check = its.check

its.members("IPython.core.interactiveshell.InteractiveShell", "_get_exc_info", "_showtraceback")
TRACEBACK = "_render_traceback_"
"""A method of an exception by which it says itself how it is shown; documented by IPython."""
PRETTY = "_repr_pretty_"
"""A method by which an object says how a cell shows it; documented by IPython."""
MODEL_VERSION, VIEW_VERSION = "_model_module_version", "_view_module_version"
"""Traits of a widget: of which version its front end is to be."""

Way = tuple[Any, Callable[[], Any], Callable[[list[Any]], None]]


class ShownErrors(InteractiveShell):
    """A shell that is asked how an error is shown, and told what is shown."""

    def shown_traceback(self, error: BaseException, tb: Any) -> Any:
        """What of the stack is shown."""
        return tb

    def take_traceback(self, lines: list[str]) -> None:
        """In place of printing it."""

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        etype, value, tb = super()._get_exc_info(exc_tuple)
        return etype, value, self.shown_traceback(value, tb)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.take_traceback(list(stb))


def renders(error: BaseException) -> Callable[[], list[str]] | None:
    """How the exception itself says that it is shown."""
    found: Callable[[], list[str]] | None = getattr(error, TRACEBACK, None)
    return found


def show_as(error: BaseException, lines: list[str]) -> None:
    """IPython shows these lines in place of a traceback. A class with slots takes no such attribute."""
    setattr(error, TRACEBACK, lambda: lines)


def cell_names(shell: Any) -> dict[str, int] | None:
    """File names of cells → their numbers; IPython 7 has none."""
    found: dict[str, int] | None = getattr(shell.compile, "_filename_map", None)
    return found


def autoreloader(shell: Any) -> Any:
    """What `%autoreload` works with; None where it was never loaded."""
    return getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)


def busy(kernel: Any, message: Any = None) -> None:
    """Tell the front end that the kernel works, on this message."""
    kernel._publish_status("busy", "shell", **({} if message is None else {"parent": message}))


def idle(kernel: Any, message: Any) -> None:
    kernel._publish_status("idle", "shell", parent=message)


def door(kernel: Any) -> Way | None:
    """The main thread's socket, where replies go, and what puts a message back; None where it is not known how."""
    try:
        thread = getattr(kernel, "shell_channel_thread", None)
        if thread is not None:  # ipykernel 7: another thread reads, and passes on what is for the main one
            pair = thread.manager._shell_channel_to_main
            stream, loop = pair.to_stream, kernel.io_loop

            def back(frames: list[Any]) -> None:
                loop.add_callback(stream._recv_callback, frames)

            return pair.to_socket, lambda: thread.manager.get_subshell_to_shell_channel_socket(None), back
        if hasattr(kernel, "schedule_dispatch") and hasattr(kernel, "msg_queue"):  # ipykernel 6

            def again(frames: list[Any]) -> None:
                kernel.schedule_dispatch(kernel.dispatch_shell, frames)

            return kernel.shell_stream.socket, lambda: kernel.shell_stream, again
    except AttributeError:
        pass
    return None


def answer_in_own_thread(comm: Any) -> None:
    """ipykernel 7.4 answers a page in the thread that has last sent to it, which is the one that is busy with the cell:
    its own choice was the better one."""
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def reply_through_stream(kernel: Any) -> None:
    """ipykernel 7.0 to 7.3 send replies past the stream that reads requests from the same socket, which then may never
    hear of a request that came meanwhile: a cell waits for ever, one in some hundred. What 7.4 does."""
    manager: Any = getattr(getattr(kernel, "shell_channel_thread", None), "_manager", None)
    stream = getattr(kernel, "shell_stream", None)
    if stream is not None and hasattr(manager, "_shell_socket"):
        manager._shell_socket = stream
