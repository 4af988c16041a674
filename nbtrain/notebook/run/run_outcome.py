"""How the ranks of one run have ended, and whose state is the cell's."""

from __future__ import annotations

from nbtrain.base.events import Failed, Finished


class Outcome:
    """The last event of each rank of a run, and what follows from them."""

    def __init__(self, ranks: tuple[int, ...], world_size: int) -> None:
        """`ranks` run the cell; the others of `world_size` are only told of it."""
        self.ranks = ranks
        self.world_size = world_size
        self.lead = ranks[0]
        self.finished: dict[int, Finished] = {}
        self.failed: dict[int, Failed] = {}
        self._in_pieces = False
        """stays set once a rank has said so: later events do not repeat it"""

    @property
    def everybody(self) -> bool:
        """Whether all ranks run the cell."""
        return set(self.ranks) == set(range(self.world_size))

    @property
    def silent(self) -> set[int]:
        """Ranks that have not ended."""
        return set(range(self.world_size)) - set(self.finished) - set(self.failed)

    @property
    def fault(self) -> bool:
        """Whether a rank raised something by itself, not because we interrupted it."""
        return any(not failed.interrupted for failed in self.failed.values())

    @property
    def cut(self) -> bool:
        """Whether some rank did not end between two steps."""
        return any(not failed.between for failed in self.failed.values())

    @property
    def lost_cards(self) -> set[int]:
        """Ranks that can use their card no more: what they had there is gone."""
        return {rank for rank, failed in self.failed.items() if failed.card_lost}

    def without(self, dead: set[int]) -> None:
        """Forget these ranks: what they had is gone with them."""
        self.failed = {rank: failed for rank, failed in self.failed.items() if rank not in dead}
        self.finished = {rank: done for rank, done in self.finished.items() if rank not in dead}

    def best(self) -> int | None:
        """The rank whose state is the cell's: the lead if it stands between two steps, or one that has come far."""
        if self.lead in self.finished:
            return self.lead
        able = {rank: failed for rank, failed in self.failed.items() if failed.whole}
        if self.lead in able:
            return self.lead
        if ended := [rank for rank in self.ranks if rank in self.finished]:  # the lead died after they had ended
            return ended[0]
        return max(able, key=lambda rank: (able[rank].calls, -rank), default=None)

    @property
    def in_pieces(self) -> bool:
        """Whether no rank has a whole model: what the cell did comes home from all of them, or not at all."""
        self._in_pieces |= any(done.waits for done in self.finished.values())
        self._in_pieces |= any(failed.pieces for failed in self.failed.values())
        return self._in_pieces

    @property
    def at_one_step(self) -> bool:
        """Whether all ranks are there, and their pieces fit together."""
        if not set(self.ranks) <= set(self.finished) | set(self.failed):
            return False
        calls = {done.calls for done in self.finished.values()} | {failed.calls for failed in self.failed.values()}
        return len(calls) == 1 and all(failed.whole for failed in self.failed.values())

    @property
    def steps(self) -> int:
        """Steps that the best rank has taken."""
        best = self.best()
        return 0 if best is None else (self.finished | self.failed)[best].steps

    def led_by(self, lead: int) -> set[int]:
        """Make this rank the lead. Returns the ranks that have yet to pack what comes home."""
        self.lead = lead
        if self.in_pieces:
            waiting = set(self.ranks)
            self.failed, self.finished = {}, {}
            return waiting
        waiting = {rank for rank in self.failed if rank in self.ranks} if lead in self.failed else set()
        if lead in self.finished and self.finished[lead].home is None:  # it has ended as one that is not the lead
            waiting.add(lead)
            del self.finished[lead]
        self.failed = {rank: failed for rank, failed in self.failed.items() if rank not in waiting}
        return waiting

    def alike(self) -> bool:
        """Whether all ranks have taken the same steps, wherever they were cut short."""
        ended = set(self.ranks) <= set(self.failed)
        return ended and len({self.failed[rank].calls for rank in self.ranks}) == 1

    @property
    def grouped(self) -> bool:
        """Whether the process group still exists on all ranks."""
        ended = all(done.grouped for done in self.finished.values())
        return ended and all(failed.grouped for failed in self.failed.values())

    def quiet(self) -> bool:
        """Whether the ranks have entered the same collectives and come out of them. If not, the next one would pair up
        with one that was cut short, and wait forever: an interrupt strikes each rank somewhere else."""
        if self.world_size == 1 or not self.everybody:  # collectives are refused on some ranks only
            return True
        ends = {(failed.name, failed.text, failed.calls, failed.entered) for failed in self.failed.values()}
        cut = any(failed.interrupted and not failed.between for failed in self.failed.values())
        return len(self.failed) == self.world_size and len(ends) == 1 and not cut
