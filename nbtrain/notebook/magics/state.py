"""What the magics of one shell remember between cells: defaults, the session, what ran last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.notebook.magics.line.parse import Request, parse
from nbtrain.notebook.magics.line.resolve import Resolver

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbtrain.notebook.cell import Cell
    from nbtrain.notebook.magics.cells import RawCell
    from nbtrain.notebook.session import Session


OpenSession = Callable[[Any, Callable[[], None]], "Session"]
"""Makes the session of a shell; it calls the second argument when idle ranks have given their GPUs back."""


class MagicsState:
    """One per shell, made when the extension is loaded."""

    def __init__(self, shell: InteractiveShell, open_session: OpenSession, doctor: Callable[[], str]) -> None:
        self.shell = shell
        self.defaults = Request()
        self.last: Request | None = None
        """options of the last `%%distributed` cell over the defaults at that time, for `%%rank`"""
        self.last_cell: Cell | None = None
        self.last_line: tuple[Request, Request] | None = None
        """its options, and the defaults at that time"""
        self.failed: set[int] = set()
        """numbers of the cells that raised"""
        self.devices = Resolver(lambda: self.session)
        self.seen: RawCell | None = None
        self.session: Session | None = None
        """made on first use, because it loads torch"""
        self._open_session = open_session
        self.doctor = doctor
        self.manual = ""
        """with the names under which the magics were registered"""

    @property
    def notebook(self) -> dict[str, Any]:
        names: dict[str, Any] = self.shell.user_ns
        return names

    def opened(self) -> Session:
        if self.session is None:
            with shielded():  # it may import torch, and half a torch is broken for as long as the kernel lives
                self.session = self._open_session(self.shell, self.devices.forget)
        return self.session

    def read(self, line: str) -> Request:
        return parse(line, self.notebook)

    def world_size(self) -> int | None:
        """The number of ranks that run or would run, if it is known without looking for devices."""
        wanted = self.defaults.value("devices").value
        return self.devices.world_size() or (wanted if isinstance(wanted, int) and wanted > 0 else None)

    def set_defaults(self, request: Request) -> str:
        """Set them, and return what to tell the user."""
        self.defaults = Request(given=request.given, own=request.own).over(self.defaults)
        self.last = None
        return f"from now on: {self.defaults}"

    def forget_ranks(self) -> None:
        """The ranks were stopped: the next cell chooses devices again."""
        self.last = None
        self.devices.forget()

    def close(self) -> bool:
        """Close the session; returns whether there was one."""
        session, self.session = self.session, None
        try:
            if session is not None:
                session.close()
        finally:
            self.forget_ranks()
        return session is not None
