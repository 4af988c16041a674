"""`%distributed debug`: talks with the debugger of a rank about the error of the last cell."""

from __future__ import annotations

import sys
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.base.events import DebugLeft, DebugPrompt, Display, Output
from nbtrain.base.messages import Debug, Typed
from nbtrain.notebook.debugging.input_line import NoInput, ask, can_answer, check_input

BEAT = 0.05


class PostMortem:
    """One session. All calls come from the main thread."""

    def __init__(self, shell: Any, ranks: Any, rank: int) -> None:
        """`ranks`: the PoolManager."""
        self._shell = shell
        self._ranks = ranks
        self._rank = rank
        self._interrupts = 0

    def talk(self) -> str | None:
        """Talk until the user leaves. What is returned says why there is nothing to talk about."""
        self._ranks.send(Debug(), [self._rank])
        refused: NoInput | None = None
        while isinstance(event := self._next(), DebugPrompt):
            try:
                line = None if refused is not None else self._ask(event)
            except NoInput as why:
                line, refused = None, why
            self._ranks.send(Typed(text=line), [self._rank])
        if refused is not None:
            raise UsageError(str(refused))
        return self._why_gone() if event is None else event.text or None

    def _ask(self, asked: DebugPrompt) -> str | None:
        check_input(self._shell)
        sys.stdout.write(asked.text)
        sys.stdout.flush()
        self._interrupts = 0
        return ask(asked.prompt, lambda: not can_answer(self._ranks.pool, self._rank))

    def _next(self) -> DebugPrompt | DebugLeft | None:
        """What the debugger says next; None: its rank is dead. Stop interrupts what it evaluates, and, pressed again,
        ends the rank."""
        while True:
            try:
                for event in self._ranks.listen(BEAT):
                    if event.rank == self._rank and isinstance(event, DebugPrompt | DebugLeft):
                        return event
                    self._show(event)
                if self._ranks.pool is None or self._is_dead:
                    return None
            except KeyboardInterrupt:
                self._interrupt()

    def _interrupt(self) -> None:
        self._interrupts += 1
        end = self._ranks.pool.interrupt if self._interrupts == 1 else self._ranks.pool.kill
        end([self._rank])

    def _show(self, event: Any) -> None:
        """What an expression prints or displays."""
        if isinstance(event, Output):
            (sys.stdout if event.stream == "stdout" else sys.stderr).write(event.text)
        elif isinstance(event, Display) and event.data is not None:
            self._shell.display_pub.publish(dict(event.data), dict(event.metadata))

    @property
    def _is_dead(self) -> bool:
        return any(death.rank == self._rank for death in self._ranks.deaths)

    def _why_gone(self) -> str:
        died = next((str(death) for death in self._ranks.deaths if death.rank == self._rank), "the ranks are gone")
        return f"{died}, and its frames with it; the next cell starts a new one"
