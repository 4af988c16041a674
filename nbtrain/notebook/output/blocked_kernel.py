"""Answers a front end while a cell blocks the kernel: which widgets there are, and what they show.

A kernel reads such requests when its cell has ended: a page that is reloaded in the middle of a run would show nothing
until then, and on kernels without subshells the dashboard's buttons would do nothing. So the main thread looks into its
socket whenever it has looked at the ranks. All other messages are kept in order until the cell has ended: neither a
queued cell nor a callback of the user's may run inside of this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nbtrain.compat import kernel

CONTROL = "jupyter.widget.control"
"""the comm on which a reloaded page asks for the state of all widgets"""
ASK = ("request_state", "request_states")
DELIMITER = b"<IDS|MSG>"

Frames = list[Any]


class BlockedKernel:
    """Answers front ends while one cell blocks the kernel. All calls come from the main thread."""

    def __init__(self, shell: Any, ours: Callable[[str], bool]) -> None:
        """`ours`: whether a comm, by its id, is the dashboard's."""
        self._ours = ours
        self._kernel: Any = getattr(shell, "kernel", None)
        self._controls: set[str] = set()
        self._channel = kernel.shell_channel(self._kernel)

    def answer(self) -> None:
        """Answer what has come since the last call."""
        if self._channel is None:
            return
        import zmq

        socket, reply_to, later = self._channel
        try:
            # Read all: what is left unread after a send would wake nobody up.
            while True:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                kind, content = _look(frames)
                if self._is_answered(kind, content):
                    self._serve(frames, kind, reply_to())
                else:
                    later(frames)
        except zmq.Again:
            pass
        except Exception:  # this kernel works differently
            self._channel = None

    def _serve(self, frames: Frames, kind: str, stream: Any) -> None:
        own = self._kernel
        idents, rest = own.session.feed_identities(frames, copy=False)
        message = own.session.deserialize(rest, content=True, copy=False)
        kernel.busy(own, message)
        try:
            result = own.shell_handlers[kind](stream, idents, message)
            if hasattr(result, "send"):
                _run(result)
        finally:
            kernel.idle(own, message)
            kernel.busy(own)  # the cell still runs
            if hasattr(stream, "flush"):
                import zmq

                stream.flush(zmq.POLLOUT)

    def _is_answered(self, kind: str, content: Any) -> bool:
        if kind in ("kernel_info_request", "comm_info_request"):
            return True
        comm = content.get("comm_id", "")
        if kind == "comm_open" and content.get("target_name") == CONTROL:
            self._controls.add(comm)
            return True
        if kind in ("comm_msg", "comm_close") and comm in self._controls:
            return True
        data = content.get("data") or {}
        return kind == "comm_msg" and (data.get("method") in ASK or self._ours(comm))


def _look(frames: Frames) -> tuple[str, Any]:
    """Kind and content. Signatures are checked by the session, only once, when a message is taken."""
    parts = [bytes(frame) for frame in frames]
    if DELIMITER not in parts:  # a message of the kernel to itself
        return "", {}
    at = parts.index(DELIMITER) + 2
    return json.loads(parts[at])["msg_type"], json.loads(parts[at + 3])


def _run(coroutine: Any) -> None:
    """Run a handler; those that are called here await nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
