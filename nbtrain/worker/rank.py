"""The main loop of a rank: answers the kernel's messages, from the first to the last."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import nbtrain.compat.intercept as intercept
from nbtrain.base.events import Event, RankState
from nbtrain.base.messages import Close, Debug, Regroup, RunCell, Typed
from nbtrain.compat import lightning
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.worker.debugging.rank_debugging import RankDebugging
from nbtrain.worker.home.homecoming import Homecoming
from nbtrain.worker.home.rank_side import RankSide
from nbtrain.worker.loop.shared_board import ABORT, LOCALS, TAKEN, Board
from nbtrain.worker.process import rank_imports
from nbtrain.worker.process.cell_runs import CellRuns
from nbtrain.worker.process.failure_report import FailureReport
from nbtrain.worker.process.interrupts import Interrupts
from nbtrain.worker.process.other_trainers import OtherTrainers
from nbtrain.worker.process.process_group import RankGroup
from nbtrain.worker.process.rank_channel import Link
from nbtrain.worker.process.rank_config import RankConfig, answer_in
from nbtrain.worker.process.rank_environment import NotebookEnvironment, apply_environment, bind_device, unless_set
from nbtrain.worker.process.rank_runtime import RankRuntime
from nbtrain.worker.shell.meters import LastPlace, Meters
from nbtrain.worker.shell.output import Outputs
from nbtrain.worker.shell.rank_widgets import send_widgets
from nbtrain.worker.shell.shell import RankShell


class Rank:
    """One rank's process, once its shell exists. What it is made of is given the rank, and finds the rest there."""

    def __init__(self, config: RankConfig, shell: RankShell, table: ObjectTable | None = None) -> None:
        self.config, self.info, self.shell = config, config.info, shell
        self.link = Link(config.directory, config.info.rank, config.secret)
        self.board = Board.open(config.board, self.info.world_size)
        taken = self.board.parts[self.info.rank][TAKEN:]
        self.outputs = Outputs(self.info.rank, self.link.send, config.texts, (taken, taken[1:]))
        shell.outlet = self.outputs.outlet
        send_widgets(self.outputs.outlet)
        self.group = RankGroup(self.info, config.backend, self.board, config.address)
        self.libraries = OtherTrainers(self.info)
        place = LastPlace(config.last_place)
        self.meters = Meters(self.info.rank, self.outputs, self.link.send, self._look_at_board, place)
        self.twins = RankSide(self.info.rank, self.info.world_size, shell.user_ns, config.directory, self.info.device)
        if table is not None:
            self.twins.inherit(table)
        self.runtime = RankRuntime(self)
        self.cells = CellRuns(self)
        self.home = Homecoming(self)
        self.failing = FailureReport(self)
        shell.worth_showing = self.failing.worth_showing
        running = self.cells.running
        self.debugging = RankDebugging(self.info, shell, self.link, self.outputs, self.board, running)
        shell.stop_here = self.debugging.stop
        self._told_locals = self.board.head[LOCALS]
        """the last request for locals that was answered"""
        self._early = config.early
        """not all that it may need is imported"""
        self.answers: dict[type, Callable[[Any], None]] = {
            RunCell: self.cells.run,
            Debug: lambda message: self.debugging.post_mortem(),
            Regroup: self._regroup,
            Typed: lambda message: None,  # to a debugger that has left
            **self.home.answers,
        }

    def serve(self) -> None:
        self.interrupts = Interrupts(self.board, self.info.rank)
        answer_in(self.config.stack)
        self.say(RankState, state="starting")
        try:
            self._set_up()
        except BaseException as error:  # an exit code alone would tell nobody why
            self.failing.fail(error)
            raise
        gc.freeze()  # what was imported stays: a collection after a failed cell need not look at it
        self.say(RankState, state="ready")
        intercept.lay_aside()
        while True:
            message = self.link.receive()
            if self._early and type(message) is RunCell and not message.spec.pool.early:
                self._early = False
                for do in rank_imports.before_training():
                    do()
            with intercept.in_place():
                if type(message) is Close:
                    return self._close()
                try:
                    if self.cells.broken:
                        self.cells.broken, self.cells.last = False, None
                        self.runtime.give_up()
                    self.answers[type(message)](message)
                except Exception as error:  # of ours: an exit code alone would tell nobody why
                    self.failing.fail(error)
                    raise

    def _set_up(self) -> None:
        """Threads, device, process group: what makes this process a rank."""
        if not self._early:
            rank_imports.dtensor()  # there, but in a process that no nursery has forked
        run_id = os.path.basename(self.config.directory)
        config = self.config
        own = apply_environment(
            self.info, config.backend, config.environ, run_id, config.address, config.master, config.shares_cards
        )
        self.taken = NotebookEnvironment(self.shell, own, unless_set(self.info))
        bind_device(self.info, self.config.directory)
        lightning.tell_rank(self.info.rank)
        self.group.form(self.config.store)
        self.libraries.listen()
        self.debugging.listen()

    def _regroup(self, message: Regroup) -> None:
        self.group.dissolve()
        self.group.form(message.store)
        self.cells.regrouped = True
        self.say(RankState, state="ready")

    def _close(self) -> None:
        self.runtime.close(False)
        self.group.dissolve()
        self.outputs.finish()
        self.link.close()

    def _look_at_board(self, number: int) -> None:
        """Called in the meters' thread: give up the group once the kernel says that peers of this run will not come,
        and tell the locals once it asks for them."""
        if self.board.head[ABORT] == number != self.failing.gave_up:
            self.failing.gave_up = number
            if self.runtime.now is not None and self.runtime.now.card_steps is not None:
                self.runtime.now.card_steps.give_up()
            self.group.give_up()
        if self.board.head[LOCALS] != self._told_locals:
            self._told_locals = self.board.head[LOCALS]
            self.debugging.tell_locals(self._told_locals)

    # -- what it says --------------------------------------------------------------------

    def say(self, kind: type[Event], **more: Any) -> None:
        self.link.send(kind(rank=self.info.rank, time=time.time(), **more))

    def complain(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.outputs.outlet.write("stderr", line + "\n")

    def send_last(self, event: Event) -> None:
        """Of what a cell says: what it has printed goes first."""
        self.outputs.finish()
        self.link.send(event)
