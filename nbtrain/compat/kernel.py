"""Internals of ipykernel, IPython, comm and ipywidgets. Each function does without where they are not there: IPython
7.34 to 9.18, ipykernel 6.17 to 7.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbtrain.compat.internals import Internals

its = Internals("ipython")

its.members("IPython.core.interactiveshell.InteractiveShell", "_get_exc_info", "_showtraceback")
TRACEBACK = "_render_traceback_"
"""The method with which an exception renders its own traceback; documented by IPython."""
MODEL_VERSION, VIEW_VERSION = "_model_module_version", "_view_module_version"
"""The traits of a widget that say which version of its front end to load."""

ShellChannel = tuple[Any, Callable[[], Any], Callable[[list[Any]], None]]


class ShownErrors(InteractiveShell):
    """A shell that is asked how an error is shown, and told what is shown."""

    def shown_traceback(self, error: BaseException, tb: Any) -> Any:
        """The part of the stack to show."""
        return tb

    def take_traceback(self, lines: list[str]) -> None:
        """Called with a rendered traceback, which is not printed."""

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        etype, value, tb = super()._get_exc_info(exc_tuple)
        return etype, value, self.shown_traceback(value, tb)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.take_traceback(list(stb))


def renders(error: BaseException) -> Callable[[], list[str]] | None:
    """The function with which an exception renders its own traceback, if it has one."""
    render: Callable[[], list[str]] | None = getattr(error, TRACEBACK, None)
    return render


def show_as(error: BaseException, lines: list[str]) -> None:
    """IPython shows these lines in place of a traceback. A class with slots takes no such attribute."""
    setattr(error, TRACEBACK, lambda: lines)


def takes_input(kernel: Any) -> bool:
    """Whether the front end that runs this cell lets its user type. True where it is not known: then asking tells."""
    return bool(getattr(kernel, "_allow_stdin", True))


def cell_names(shell: Any) -> dict[str, int] | None:
    """File names of cells → their numbers; IPython 7 has none."""
    names: dict[str, int] | None = getattr(shell.compile, "_filename_map", None)
    return names


def autoreloader(shell: Any) -> Any:
    """The object behind `%autoreload`; None where it was never loaded."""
    return getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)


def busy(kernel: Any, message: Any = None) -> None:
    """Tell the front end that the kernel is busy with this message."""
    kernel._publish_status("busy", "shell", **({} if message is None else {"parent": message}))


def idle(kernel: Any, message: Any) -> None:
    kernel._publish_status("idle", "shell", parent=message)


def shell_channel(kernel: Any) -> ShellChannel | None:
    """The main thread's socket, a function that returns the stream for replies, and one that puts a message back; None
    where this kernel works differently."""
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
    hear of a request that came meanwhile: a cell waits forever, one in some hundred. What 7.4 does."""
    manager: Any = getattr(getattr(kernel, "shell_channel_thread", None), "_manager", None)
    stream = getattr(kernel, "shell_stream", None)
    if stream is not None and hasattr(manager, "_shell_socket"):
        manager._shell_socket = stream
