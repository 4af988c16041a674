"""Brings home what a cell changed, and answers what the kernel asks of objects that the rank holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbtrain.base.errors import UsageError, text_of
from nbtrain.base.events import Adopted, Finished, Pulled, Repacked
from nbtrain.base.messages import Adopt, Conclude, Forget, Leave, Pull, RunCell, Serve
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.worker.home.pack_changes import KERNEL, LIMIT, PackChanges


class Homecoming:
    """One per rank."""

    def __init__(self, rank: Any) -> None:
        """`rank`: the one of worker/rank.py."""
        self._rank = rank
        self._lead = 0
        """the rank whose changes come home"""
        self._place: tuple[bytes | None, bool] = None, False
        """where an elastic run goes on, and whether the end of a step's body was left"""
        self.answers: dict[type, Callable[[Any], None]] = {
            Conclude: self._conclude,
            Adopt: self._adopt,
            Pull: self._pull,
            Serve: lambda message: rank.twins.pieces.serve(message.lead),
            Leave: self._leave,
            Forget: self._forget,
        }

    def begin(self, lead: int) -> None:
        self._lead, self._place = lead, (None, False)

    def end(self, run: RunCell, names: dict[str, Any]) -> None:
        """A cell has come to its end by itself."""
        if self._shares_pieces(run):
            # All ranks are needed to bring it home: the kernel says so once each has come to the end of the cell.
            self._rank.send_last(self.finished(calls=self._rank.runtime.now.steps.calls, waits=True))
        else:
            self._send(run, names, together=False)

    def finished(self, **more: Any) -> Finished:
        rank, runtime = self._rank, self._rank.runtime.now
        return Finished(
            rank=rank.info.rank, time=time.time(), steps=runtime.steps.count, grouped=rank.group.intact,
            place=self._place, resumed=runtime.checkpoints.resumed, **more,
        )  # fmt: skip

    def _shares_pieces(self, run: RunCell) -> bool:
        """Whether no rank has the whole model, so that all of them must help to bring it home."""
        several = len(run.ranks) == self._rank.info.world_size > 1
        return several and bool(self._rank.twins.pieces or self._rank.runtime.now.components.pieces())

    def _send(self, run: RunCell, names: dict[str, Any], together: bool) -> None:
        """Pack what the cell changed and send it. `together`: no rank has the whole of it."""
        rank, twins, runtime = self._rank, self._rank.twins, self._rank.runtime.now
        everybody, several = len(run.ranks) == rank.info.world_size, rank.info.world_size > 1
        lead, checksums = self._lead == rank.info.rank, runtime.replica_checksums
        # Whether what the cell has edited is to be the same on all ranks. Under `none` every rank has its own.
        alike = everybody and several and not runtime.strategy.facts.hands_off
        try:
            if everybody:
                twins.compare(runtime.components.pieces(), names, run.spec.keep)
            homeward = twins.homeward(names, run.spec.keep, LIMIT if run.spec.pool.start != "fork" else math.inf)
            # Else no tensor need be asked: most warm cells train nothing.
            may_have_gradients = run.gradients or runtime.backward_and_step.ran_backward
            values = homeward.values(checksums.weights) if len(run.ranks) > 1 else None
            finished = self.finished(
                home=self._pack(homeward, lead, together, alike),
                gradients=twins.with_gradients() if may_have_gradients else (),
                lost_gradients=tuple(runtime.backward_and_step.gradients_between_cells.lost.values()),
                random_states=runtime.randomness.collect_packed() if lead else None,
                replica_checksums=checksums.take(homeward.rewritten(), homeward.checksum) if several else None,
                values=values,
                edited=homeward.edited(checksums.weights) if alike else (),
                compared=runtime.compared() if everybody and several else {},
                released=twins.released(),
                notes=(*rank.cells.notes, *twins.unsendable),
                advice=runtime.advice(rank.shell.user_ns) if lead else {},
            )
        except Exception as error:  # what went wrong on the way home is the cell's failure: nothing has come home
            rank.failing.fail(error)
        else:
            rank.outputs.finish()
            unsaid = rank.outputs.outlet.unsaid()
            rank.link.send(finished if unsaid is None else replace(finished, began=unsaid))
            if finished.steps and twins.pieces:
                twins.pieces.return_freed_memory()

    def _pack(self, homeward: PackChanges, lead: bool, together: bool, alike: bool) -> HomeParcel | None:
        pieces = self._rank.twins.pieces
        if lead:
            home = homeward.pack(self._rank.twins.packer, pieces if together else None)
            if home.news or home.holders:  # as the others do when they adopt them
                self._rank.runtime.objects.clear()
            return home
        if together:
            pieces.serve(self._lead)
        if alike:
            homeward.look()
        return None

    # -- what the kernel asks -------------------------------------------------------------

    def _conclude(self, message: Conclude) -> None:
        """Bring the cell home: all ranks have ended it, or it was cut short and the notebook recovers what it did."""
        rank, cells, runtime = self._rank, self._rank.cells, self._rank.runtime.now
        rank.debugging.release(only_if_full=True)
        if cells.last is None:
            error = UsageError("what the cell had done is gone with its end, which failed in nbtrain's own code")
            rank.failing.fail(error)
            return
        run, names = cells.last
        if runtime.checkpoints.elastic is not None and not cells.ended:
            self._place = runtime.checkpoints.elastic.go_back()
        self._lead = message.lead
        if message.lead == rank.info.rank != run.ranks[0]:
            rank.twins.become_lead()
        self._send(run, names, self._shares_pieces(run))

    def _adopt(self, message: Adopt) -> None:
        lacking = self._rank.twins.adopt(message.news, message.holders)
        self._rank.runtime.objects.clear()
        self._rank.say(Adopted, lacking=lacking)

    def _pull(self, message: Pull) -> None:
        twins = self._rank.twins
        twins.packer.released(KERNEL, message.released.get(self._rank.info.rank, ()))
        try:
            parcel, reason = twins.pull(message.key, message.drop, message.together)
        except Exception as error:  # the object's own pickle method, or no memory left
            parcel, reason = None, f"{type(error).__name__}: {text_of(error)}"
        self._rank.say(Pulled, asked=message.asked, parcel=parcel, reason=reason)

    def _leave(self, message: Leave) -> None:
        self._rank.say(Repacked, home=self._rank.twins.leave(message.key, message.reason, message.together))

    def _forget(self, message: Forget) -> None:
        self._rank.twins.forget(self._rank.runtime.close, message.keep, message.known, message.whole)
        self._rank.runtime.objects.clear()
