"""Breakpoints of a running cell: which of the ranks that stop talks, and what the user answers.

Ranks that stop at one place in the program, the same line after as many collectives, stop there together: one of them
talks, the lowest, and the others go on and wait where they need it. A rank that stops elsewhere, or where the others do
not, talks for itself; several such ranks do it one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from nbtrain.base.events import DebugLeft, DebugPrompt
from nbtrain.base.humanize import ranks as ranks_in_words
from nbtrain.base.keyboard_interrupts import Presses
from nbtrain.base.messages import Typed
from nbtrain.notebook.debugging.input_line import NoInput, ask, can_answer, check_input

FIRST = "first"
"""value of --debug-ranks; others are `all` and a list of ranks"""
HOLD = 0.15
"""Seconds that a rank waits for lower ones to come to its breakpoint."""
STUCK = 0.5
"""Seconds after which the rank that talks is taken to wait for one that has stopped, too."""


class BreakpointPrompts:
    """The prompts of one run, made when the first rank stops. All calls come from the main thread."""

    def __init__(self, ranks: Any, which: str | tuple[int, ...], screen: Any, presses: Presses) -> None:
        """`ranks`: the PoolManager. `which`: of `--debug-ranks`."""
        self._ranks = ranks
        self._which = which
        self._screen = screen
        self._presses = presses
        self._waiting: dict[int, DebugPrompt] = {}
        """ranks that ask for a line"""
        self._since: dict[int, float] = {}
        self._leaving: set[int] = set()
        """ranks that wait to be stopped"""
        self._talks: int | None = None
        """the rank whose session goes on"""
        self._answered = 0.0
        self._met: dict[tuple[str, int, int], int] = {}
        """places → the rank that has talked there"""
        self._said: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether some rank is in its debugger: that others wait for it is no hang."""
        return bool(self._waiting or self._leaving) or self._talks is not None

    def take(self, event: DebugPrompt | DebugLeft) -> None:
        rank = event.rank
        if isinstance(event, DebugPrompt):
            self._waiting[rank] = event
            self._since[rank] = time.monotonic()
            return
        if self._talks == rank:
            self._talks = None
        if event.quits:
            self._leaving.add(rank)
            self._presses.ask()

    def serve(self, running: set[int], stopped: bool, waits: Callable[[int], bool]) -> None:
        """Ask the user for what a rank waits for. `running`: ranks that have not ended. `stopped`: Stop was pressed,
        and they have been told. `waits`: whether this rank waits in a collective."""
        if self._talks not in running:
            self._talks = None
        for rank in self._waiting.keys() - running:
            del self._waiting[rank]
        self._leaving &= running
        if stopped:
            self._let_go({*self._waiting, *self._leaving}, mute=True)
            self._leaving.clear()
            self._talks = None
            return
        self._let_go([rank for rank, asked in self._waiting.items() if self._passes(rank, asked)])
        if not self._presses.count and (following := self._next(running, waits)) is not None:
            self._talk(following)

    def _passes(self, rank: int, asked: DebugPrompt) -> bool:
        """Whether this rank goes on past the breakpoint that it has just reached."""
        if asked.place is None:
            return False
        if not self._may_ask(rank):
            return True
        return self._which == FIRST and self._met.get(asked.place, rank) != rank

    def _may_ask(self, rank: int) -> bool:
        return isinstance(self._which, str) or rank in self._which

    def _next(self, running: set[int], waits: Callable[[int], bool]) -> int | None:
        """The rank to talk with now."""
        if self._talks in self._waiting:
            return self._talks
        now = time.monotonic()
        if self._talks is not None and not (now - self._answered > STUCK and waits(self._talks)):
            return None
        if not self._waiting:
            return None
        lowest = min(self._waiting)
        if self._talks is not None or self._waiting[lowest].place is None:
            return lowest
        lower = any(other < lowest and self._may_ask(other) and not waits(other) for other in running)
        return None if lower and now - self._since[lowest] < HOLD else lowest

    def _talk(self, rank: int) -> None:
        asked = self._waiting[rank]
        if asked.place is not None and self._which == FIRST:
            self._met[asked.place] = rank
        self._talks = rank
        pool = self._ranks.pool
        try:
            check_input(self._ranks.shell)
            self._screen.write("stdout", asked.text)
            self._screen.flush("stdout")
            line = ask(asked.prompt, lambda: self._presses.count > 0 or not can_answer(pool, rank))
        except NoInput as why:
            self._say(f"breakpoint() on {ranks_in_words([rank])} is passed over: {why}")
            self._talks = None
            self._let_go([rank], mute=True)
            return
        self._answered = time.monotonic()
        if line is None:
            # Else its death is told, or a button has stopped the run.
            if can_answer(pool, rank) and not self._presses.count:
                self._presses.press()
            return
        del self._waiting[rank]
        self._ranks.send(Typed(text=line), [rank])

    def _let_go(self, ranks: Iterable[int], mute: bool = False) -> None:
        for rank in list(ranks):
            self._waiting.pop(rank, None)
            self._ranks.send(Typed(text=None, mute=mute), [rank])

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._screen.write("stdout", sentence + "\n")
