"""What a front end asks while a cell blocks the kernel, and can be told: which widgets there are, and what they show.

A kernel hears such questions when its cell has ended. So a page that is loaded again in the middle of a run would show
nothing until then, and on kernels without subshells the dashboard's buttons would do nothing. Both are messages that
wait at the main thread's door, and the main thread looks there between two looks at the ranks.

Only these are answered: what kernel this is, which comms there are, the state of widgets, and what the dashboard itself
is told. All else is put back in its order, for when the cell has ended: a cell that is queued must not run inside of
this one, and no callback of the user's either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nbtrain.compat import kernel

CONTROL = "jupyter.widget.control"
"""the comm at which a page that was loaded again asks for the state of all widgets"""
ASK = ("request_state", "request_states")
DELIMITER = b"<IDS|MSG>"

Frames = list[Any]


class BlockedKernel:
    """One cell's. All calls come from the main thread, which the cell blocks."""

    def __init__(self, shell: Any, ours: Callable[[str], bool]) -> None:
        """`ours`: whether a comm, by its id, is the dashboard's."""
        self._ours = ours
        self._kernel: Any = getattr(shell, "kernel", None)
        self._controls: set[str] = set()
        self._door = kernel.door(self._kernel)

    def answer(self) -> None:
        """Whatever has come since the last look."""
        if self._door is None:
            return
        import zmq

        socket, reply_to, later = self._door
        try:
            # To the very end: what is left unread after a send would wake nobody up.
            while True:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                kind, content = _look(frames)
                if self._is_answered(kind, content):
                    self._serve(frames, kind, reply_to())
                else:
                    later(frames)
        except zmq.Again:
            pass
        except Exception:  # the kernel's insides are other than was thought
            self._door = None

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
    """Kind and content; the session checks signatures, each only once, when a message is really taken."""
    parts = [bytes(frame) for frame in frames]
    if DELIMITER not in parts:  # a word of the kernel's to itself
        return "", {}
    at = parts.index(DELIMITER) + 2
    return json.loads(parts[at])["msg_type"], json.loads(parts[at + 3])


def _run(coroutine: Any) -> None:
    """The handlers that are meant here wait for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
