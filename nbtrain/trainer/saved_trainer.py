"""What a checkpoint has of a Trainer beside the weights: its counters, its callbacks' states, where its loop is."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbtrain.errors import UsageError
from nbtrain.trainer.hooks import Hooks
from nbtrain.trainer.metrics import runtime_here
from nbtrain.trainer.module import has
from nbtrain.trainer.saved_hyperparameters import LEFT_OUT
from nbtrain.training.checkpoints.api import current, load, save
from nbtrain.training.checkpoints.safe_load import check_taken, naming, plain


class SavedTrainer(Hooks):
    """The part of a Trainer that is saved and restored."""

    averaging: Any
    """the callback that averages weights"""

    def __init__(self) -> None:
        super().__init__()
        self.current_epoch = self.first_epoch = self.batches_seen = 0
        self._batches_before = 0
        """that all ranks together have seen of the epoch that a checkpoint was made in"""
        self._in_epoch = self._in_loop = False
        """`_in_loop`: over epochs; where it is, a checkpoint knows by itself"""
        self._goes_on_at: list[dict[str, Any]] | None = None
        """of a checkpoint that no loop over epochs was under way for: where the next one begins"""
        self._others_go_on_at: tuple[list[dict[str, Any]], bool] | None = None
        """loops of the user's own, after a checkpoint that he has loaded, and whether they have"""
        self._position: list[dict[str, Any]] = []
        """where loops and loaders were when a training was stopped in the middle of an epoch"""
        self._batches_left_at = 0
        """how many batches all ranks together had seen of it"""
        self._epochs_done = 0
        self._restores = False
        self._written: set[str] = set()
        """checkpoints of this trainer's"""
        self._own_folder = ""
        """that it has made for its checkpoints"""
        self._nothing_left = False
        """the training that a fit goes on with has all epochs, or steps, that there are to be"""

    @property
    def last_epoch(self) -> int:
        return self.first_epoch if self._nothing_left else super().last_epoch

    def save_checkpoint(self, path: Any, weights_only: bool = False) -> None:
        """A checkpoint from which any strategy goes on, with the trainer's own counters and callbacks.
        `weights_only`: the module alone."""
        if weights_only:
            save(path, model=self.module, trainer=_Hyperparameters(self._hyperparameters()))
        else:
            save(path, **self._held())

    def restore(self, path: str, weights_only: bool = True) -> None:
        if Path(path).is_file():
            raise UsageError(
                f"{path} is a file, and a Trainer's checkpoint a folder. To go on from the weights of Lightning's: "
                "nbtrain.load(path, model=module), then fit without ckpt_path"
            )
        self._note_others()
        current().positions.go_on(())
        self._restores = True
        try:
            with naming(f"ckpt_path={path!r}, weights_only=False"):
                load(path, weights_only=weights_only, **self._held())
        finally:
            self._restores = False
        positions = current().positions
        if self._goes_on_at is not None:
            positions.go_on(self._goes_on_at)
        place = positions.pending[0] if positions.pending else {"index": self.current_epoch - self.first_epoch}
        self._epochs_done = self.first_epoch + place["index"]
        self._position = list(positions.pending) if self._batches_left_at and place.get("loaders") else []
        self._nothing_left = self.is_done(self._epochs_done)
        if self._nothing_left:
            self.say_that_all_is_done(self._epochs_done)
        elif self.averaging is not None:
            self.averaging.check_goes_on()

    def is_done(self, epochs: int) -> bool:
        return epochs >= self.last_epoch or 0 <= self.max_steps <= self.global_step or self.limits["train"] == 0

    def say_that_all_is_done(self, epochs: int) -> None:
        if self.limits["train"] == 0:
            self.print("limit_train_batches=0: nothing is trained")
            return
        more = "the module gets its averaged weights" if self.averages_now() else "trainer.max_epochs = … goes on"
        self.print(f"{epochs} epochs, {self.global_step} steps are done: {more}")

    def averages_now(self) -> bool:
        """Whether there are averaged weights that the module does not have, now that the training is over."""
        one = self.averaging
        return one is not None and not one.has_ended and self.limits["train"] != 0 and bool(one.average.n_averaged > 0)

    def _note_others(self) -> None:
        """What else was loaded is where another loop goes on, not this one."""
        one = current()
        self._others_go_on_at = list(one.positions.pending), one.resumed

    def _back_to_others(self) -> None:
        if self._others_go_on_at is not None:
            one = current()
            pending, one.resumed = self._others_go_on_at
            one.positions.go_on(pending)
            self._others_go_on_at = None

    def restore_weights(self, path: str, weights_only: bool = True) -> None:
        with naming(f"ckpt_path={path!r}, weights_only=False"):
            load(path, model=self.module, weights_only=weights_only)

    def _held(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.module}
        for kind, held in (("optimizer", self.optimizers), ("scheduler", [one.scheduler for one in self.schedules])):
            found |= {f"{kind}-{number}" if number else kind: one for number, one in enumerate(held)}
        if self.averaging is not None:
            found["average"] = self.averaging.average
        return found | {"trainer": _Counters(self)}

    def _shares(self) -> int:
        """How many batches a step of all ranks takes."""
        runtime = runtime_here()
        if runtime is None or runtime.loaders.hands_off:
            return 1
        return int(runtime.loaders.deal.at_a_time)

    def counters(self) -> dict[str, Any]:
        """All that a checkpoint has of it."""
        if self._restores:  # only asked for its form
            return {}
        module: dict[str, Any] = {}
        if has(self.module, "on_save_checkpoint"):
            self.module.on_save_checkpoint(module)
        more: list[tuple[str, dict[str, Any]]] = []
        for one in self.callbacks:
            if has(one, "on_save_checkpoint"):
                more.append((type(one).__name__, {}))
                one.on_save_checkpoint(self, self.module, more[-1][1])
        return {
            "epoch": self.current_epoch, "global_step": self.global_step,
            "first_epoch": self.first_epoch if self._in_loop or self._position else self.current_epoch,
            "batches": (self.batch_idx + 1) * self._shares() if self._in_epoch else self._batches_in_position(),
            "position": None if self._in_loop else self._position,
            "batches_seen": self.batches_seen, "module": module, "of_callbacks": more,
            "hparams": self._hyperparameters(),
            "callbacks": [(type(one).__name__, one.state_dict()) for one in self.callbacks if has(one, "state_dict")],
        }  # fmt: skip

    def _batches_in_position(self) -> int:
        return self._batches_left_at if self._position and not self._in_loop else 0

    def _hyperparameters(self) -> dict[str, Any]:
        """Of the module, those that a checkpoint can hold: a network among them is in the weights; classes and other
        objects are given again to `load_from_checkpoint`."""
        given = dict(getattr(self.module, "hparams", None) or {})
        kept = {name: value for name, value in given.items() if _can_be_kept(value)}
        others = [name for name, value in given.items() if name not in kept and not isinstance(value, nn.Module)]
        return {**kept, LEFT_OUT: others} if others else kept

    def load_state(self, state: dict[str, Any]) -> None:
        if "epoch" not in state:
            raise UsageError(
                "this checkpoint is of weights alone: nbtrain.load(path, model=module), then fit without it"
            )
        self.current_epoch, self.global_step = state["epoch"], state["global_step"]
        self.first_epoch, self._goes_on_at = state["first_epoch"], state.get("position")
        self._batches_left_at = state["batches"]
        self._batches_before = -(-state["batches"] // self._shares())
        self.batches_seen = state["batches_seen"]
        if has(self.module, "on_load_checkpoint"):
            self.module.on_load_checkpoint(state["module"])
        for one, found in _of_same_class(self.callbacks, state["callbacks"]):
            one.load_state_dict(found)
        for one, found in _of_same_class(self.callbacks, state.get("of_callbacks", ())):
            if has(one, "on_load_checkpoint"):
                one.on_load_checkpoint(self, self.module, found)


def _can_be_kept(value: Any) -> bool:
    """Whether it can be saved, and be read again without running code of whoever wrote the checkpoint."""
    if isinstance(value, nn.Module | torch.Tensor):
        return False
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        check_taken(Path(), plain(file, Path(), weights_only=True))
    except Exception:  # whatever a class of the user's raises
        return False
    return True


class _Hyperparameters(nn.Module):
    """In a checkpoint of weights alone, in place of a Trainer's counters."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.tensor(0))
        self.__dict__["held"] = {"hparams": held}

    def get_extra_state(self) -> Any:
        return self.__dict__["held"]

    def set_extra_state(self, state: Any) -> None: ...


def _of_same_class(callbacks: list[Any], states: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, Any]]:
    kept = list(states)
    for one in callbacks:
        same = next((found for found in kept if found[0] == type(one).__name__), None)
        if same is not None:
            kept.remove(same)
            yield one, same[1]


class _Counters(nn.Module):
    """A trainer's own state in a checkpoint: what torch calls extra state, in a module with a number to be one."""

    def __init__(self, trainer: SavedTrainer) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.tensor(trainer.global_step))
        self.__dict__["trainer"] = trainer

    def get_extra_state(self) -> Any:
        return self.__dict__["trainer"].counters()

    def set_extra_state(self, state: Any) -> None:
        self.__dict__["trainer"].load_state(state)
