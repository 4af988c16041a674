"""Where a run's output appears: in the cell that runs now, in the one that began the run, or nowhere (a trial)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from nbtrain.base.specs import RunSpec


def screen_of(shell: Any, run: RunSpec) -> CellScreen:
    """Where the output of a run that begins now is shown."""
    if run.trial is not None:
        return NullScreen(shell)
    if run.background and hasattr(shell.display_pub, "pub_socket"):  # without a kernel there is one terminal for all
        return OriginCellScreen(shell)
    return CellScreen(shell)


class CellScreen:
    """The cell that runs now."""

    shows = True

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._unflushed = ""
        """the stream that was written to last, if it may not have been sent"""
        self._open: set[str] = set()
        """streams whose line goes on"""
        self.above: Callable[[], None] | None = None
        """shows what goes above all else; called once, when that comes"""

    def begin(self) -> None:
        """Something is about to be shown."""
        above, self.above = self.above, None
        if above is not None:
            above()

    def write(self, stream: str, text: str) -> None:
        """`stream`: `stdout` or `stderr`, looked up at each call, because IPython and pytest replace them. A kernel
        sends each by a clock of its own: what was written to the other one goes first."""
        if self.above is not None:
            self.begin()
        if self._unflushed not in ("", stream):
            self.flush(self._unflushed)
        self._unflushed = stream
        if text:
            (self._open.discard if text.endswith("\n") else self._open.add)(stream)
        self._write(stream, text)

    def line(self, text: str) -> None:
        """Write a line of nbtrain's own. It begins anew where a rank is in the middle of one, a bar for instance."""
        for stream in sorted(self._open):
            self.write(stream, "\n")
        self.write("stdout", text + "\n")

    def _write(self, stream: str, text: str) -> None:
        (sys.stdout if stream == "stdout" else sys.stderr).write(text)

    def flush(self, stream: str) -> None:
        """Show it now, not some tenths of a second later; in a kernel that takes nearly a millisecond."""
        self._unflushed = ""
        (sys.stdout if stream == "stdout" else sys.stderr).flush()

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        self.begin()
        self._shell.display_pub.publish(
            data=dict(data), metadata=dict(metadata or {}), transient=dict(transient or {}), update=update
        )

    def clear(self, wait: bool) -> None:
        self._shell.display_pub.clear_output(wait)

    def keep_alive(self) -> None:
        """Tell the server that something runs here, although the kernel is idle."""


class NullScreen(CellScreen):
    """Shows nothing."""

    shows = False

    def write(self, *_: Any, **__: Any) -> None: ...

    def line(self, *_: Any, **__: Any) -> None: ...

    def flush(self, *_: Any, **__: Any) -> None: ...

    def publish(self, *_: Any, **__: Any) -> None: ...

    def clear(self, *_: Any, **__: Any) -> None: ...


class OriginCellScreen(CellScreen):
    """The cell that is running when this is made, also after it has returned and others run.

    Depending on ipykernel's version, what a thread prints belongs to the cell that started the thread, to the one that
    runs now, or to none. So each message names its cell.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._publisher = shell.display_pub
        self._parent = dict(getattr(self._publisher, "parent_header", None) or {})

    def _write(self, stream: str, text: str) -> None:
        self._send("stream", {"name": stream, "text": text}, f"stream.{stream}")

    def flush(self, stream: str) -> None:
        """Each message is sent at once."""

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        from ipykernel.jsonutil import encode_images, json_clean

        self.begin()
        kind = "update_display_data" if update else "display_data"
        content = {
            "data": encode_images(dict(data)),
            "metadata": dict(metadata or {}),
            "transient": dict(transient or {}),
        }
        self._send(kind, json_clean(content), "display_data")

    def clear(self, wait: bool) -> None:
        self._send("clear_output", {"wait": wait}, "display_data")

    def keep_alive(self) -> None:
        # Front ends ignore messages of an unknown kind. A server counts them, and leaves the kernel alone.
        self._send("nbtrain_stirs", {}, "nbtrain")

    def _send(self, kind: str, content: Mapping[str, Any], topic: str) -> None:
        self._publisher.session.send(
            self._publisher.pub_socket, kind, content, parent=self._parent, ident=topic.encode()
        )
