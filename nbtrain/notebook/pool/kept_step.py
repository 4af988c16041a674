"""The last step of a failed cell, kept for `%distributed recover`: on its ranks until the next cell, then here."""

from __future__ import annotations

from typing import Any

from nbtrain.base.humanize import listed
from nbtrain.exchange.kinds.base import Node


class KeptStep:
    def __init__(self) -> None:
        self.run: Any = None
        """the end of the failed run (`Homecoming`)"""
        self.why_none = "no cell has failed"
        self.touched: list[Node] = []
        """what the last cell has brought home, where a step is kept"""

    @property
    def on_ranks(self) -> bool:
        """Whether it is nowhere but there."""
        return self.run is not None and self.run.held is None

    def hold(self) -> str:
        """Take it off the ranks, which are to begin anew. Returns a sentence."""
        if not self.on_ranks:
            return ""
        run, self.run = self.run, None
        step = f"step {run.outcome.steps:,} of the failed cell"
        try:
            lost = run.hold()
        except Exception as error:  # a rank may raise anything while it packs; the next cell runs all the same
            why = str(error).partition("\n")[0]
            self.drop(f"{step} could not be packed ({why})")
            return f"nbtrain: {self.why_none}, and is discarded"
        self.run = run
        but = f", but for {listed(lost)}, which only its ranks had" if lost else ""
        return (
            f"nbtrain: {step} stays kept until another cell has trained the same objects to its end: "
            f"%distributed recover restores it{but}"
        )

    def drop_outdated(self) -> None:
        """A cell has taken steps and come to its end: a kept step of the same tensors is none to go back to."""
        if self.run is not None and self.run.held.holds_any(self.touched):
            self.drop("another cell has trained the same objects since")

    def drop(self, why: str) -> None:
        """`why` there is none any more."""
        self.run, self.why_none = None, why
