"""Gives a cell of the notebook the weights of a run in the background while the run goes on.

All ranks save at the end of the same step, as for `--save-every`, into the ranks' own directory; the notebook loads it
into its objects, and only that: random states and loops are the run's. Before the run's work comes home, or is given
up, the notebook's objects are put back as they were: what comes home is what the run changed of that.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nbtrain.base.keyboard_interrupts import shielded, uninterrupted
from nbtrain.worker.checkpoints import folder, open_checkpoint
from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
from nbtrain.worker.checkpoints.content import CheckpointObjects
from nbtrain.worker.loop.shared_board import OPEN, REQUESTS, STEPS, UNKNOWN, WEIGHTS, WEIGHTS_AT, OwnedBoard

PAUSE = 0.01


class LiveWeights:
    """The notebook's requests to one run, one at a time. One that is not met stays open: ranks may be on their way to
    its step, and a rank past that step would miss another one."""

    def __init__(self, board: OwnedBoard, run: int, directory: str, objects: Mapping[str, Any]) -> None:
        """`objects`: the notebook's, by the names under which the ranks save them."""
        self._board = board
        self._run = run
        self._directory = Path(directory)
        self._objects = CheckpointObjects.of(objects)
        self._before: Rollback | None = None
        self._open: tuple[int, int] | None = None
        """the open request: its number, and the step after which it is met"""
        self._still: list[int] | None = None
        """where the ranks stood when it took too long"""

    def stand_still(self) -> bool:
        """Whether no step has ended since a cell waited in vain."""
        return self._still is not None and self._still == self._steps()

    def ask(self) -> int:
        """Request the weights. Returns the step of the run after which they are saved."""
        if self._open is not None and self._passed(self._open[1]) and folder.marker(self._place) is None:
            self._clear()  # ranks could not save it
        if self._open is None:
            head = self._board.head
            with shielded():  # the ranks wait for the second word
                head[WEIGHTS_AT] = UNKNOWN
                head[WEIGHTS] = max(head[WEIGHTS], self._run * REQUESTS) + 1
                self._board.settle()
                head[WEIGHTS_AT] = max(self._steps(), default=0) + 1
                self._open = head[WEIGHTS], head[WEIGHTS_AT]
        return self._open[1]

    def request(self) -> str:
        """As `ask`, for who reads them in another process: the step, and the folder's name. It stays until the second
        one after it is asked for, and while it is read."""
        if self._open is not None and folder.marker(self._place) is not None:
            self.close(but=self._place)
            self._open = None
        return f"{self.ask()} {self._place.name}"

    def fetch(self, enough: Callable[[], bool]) -> bool:
        """Wait for the weights and load them into the notebook's objects; False if `enough()` came first."""
        place = self._place
        while folder.marker(place) is None:
            if enough():
                self._still = self._steps()
                return False
            time.sleep(PAUSE)
        try:
            with shielded():  # never half a model
                self._before = self._before or Rollback(self._objects)
                checkpoints = Checkpoints()
                # Its own ranks have written it.
                source = open_checkpoint.together(place, checkpoints.say, weights_only=False)
                uninterrupted(lambda: checkpoints.work.restore(source, self._objects, asked=False))
        finally:
            self._clear()
        return True

    def close(self, but: Path | None = None) -> None:
        """The run is over. `but`: this one stays, as do those that are being read."""
        if self._before is not None:
            self._before.put_back()
        self._before = None
        for left in self._directory.glob(f"{folder.ANSWER}*"):
            if left != but and not folder.in_use(left):
                folder.remove(left)

    @property
    def _place(self) -> Path:
        assert self._open is not None
        return folder.answer_to(self._directory, self._open[0])

    def _clear(self) -> None:
        folder.remove(self._place)
        self._open = self._still = None

    def _passed(self, step: int) -> bool:
        """Whether every rank is past this step, and has written its part or failed to."""
        return all(ended > step for ended in self._steps())

    def _steps(self) -> list[int]:
        return [part[STEPS] for part in self._board.parts if abs(part[OPEN]) == self._run]


class Rollback:
    """What these objects held when it was made, to be put back exactly."""

    def __init__(self, objects: CheckpointObjects) -> None:
        modules = objects.modules.values()
        owned = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._optimizers = []
        for optimizer in objects.optimizers.values():
            groups = optimizer.param_groups
            options = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups]
            state = {p: dict(values) for p, values in optimizer.state.items()}
            self._optimizers.append((optimizer, state, options))
            owned += [p for group in groups for p in group["params"]]
            owned += [
                value for values in state.values() for value in values.values() if isinstance(value, torch.Tensor)
            ]
        # By address: what two share is copied once.
        unique = {id(tensor): tensor for tensor in owned}.values()
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in unique if not tensor.is_meta]
        self._schedulers = [
            (scheduler, copy.deepcopy(scheduler.state_dict())) for scheduler in objects.schedulers.values()
        ]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, content in self._tensors:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
        for optimizer, state, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({p: dict(values) for p, values in state.items()})
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
                group.update(options)
        for scheduler, before in self._schedulers:
            scheduler.load_state_dict(before)
