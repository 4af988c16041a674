"""`save` and `load` on a rank, in the middle of a cell.

Both are collective: every rank calls them, with the same path and objects. What a rank finds wrong before anything is
changed is told to the others first, so that all of them raise.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from nbtrain.base.errors import NbtrainError, NotSupported, UsageError
from nbtrain.base.keyboard_interrupts import changing, uninterrupted
from nbtrain.compat import tensors
from nbtrain.compat import tested_versions as versions
from nbtrain.worker.checkpoints import folder, open_checkpoint, tensor_files
from nbtrain.worker.checkpoints.background_write import BackgroundWrite, NotWritten, WriteJob, give_up, owe
from nbtrain.worker.checkpoints.content import (
    CheckpointObjects,
    Content,
    Holdings,
    ParameterNames,
    RankPart,
    TensorInfo,
    owners,
    snapshot,
)
from nbtrain.worker.checkpoints.open_checkpoint import ABOUT, FORMAT, CheckpointSource, agree
from nbtrain.worker.checkpoints.restore import Match, Restore, compare
from nbtrain.worker.checkpoints.schedule import SaveSchedule, place_of
from nbtrain.worker.random_states.default_generators import capture, restore
from nbtrain.worker.ranks import collectives

_writing, _live_weights_write = BackgroundWrite(), BackgroundWrite()
"""A process writes one checkpoint at a time, whatever strategy its cells have, and one that the notebook waits for."""
SEEN = 2.0
"""Seconds in which every machine should see a folder that was made on another: shared ones are a little late."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that is to be made of these objects."""

    place: Path
    chosen: CheckpointObjects
    full_format: bool = False
    in_a_step: bool = False
    keep: int | None = None
    """how many checkpoints stay in the folder, if it is made at an interval"""


class SaveAndLoad:
    """Saves and loads for the cells of one `Checkpoints` (checkpoints_of_cell.py, which loads this file)."""

    def __init__(self, of: Any) -> None:
        self.of, self.say, self.positions = of, of.say, of.positions
        self.rank, self.world_size, self.strategy = of.rank, of.world_size, of.strategy
        self.components, self.randomness, self.steps, self.scaling = of.components, of.randomness, of.steps, of.scaling
        self.writing = _writing

    # --- what the cell calls ---------------------------------------------------------------------

    def save(self, path: Any, objects: Mapping[str, Any], full_format: bool = False) -> None:
        """`objects`: by name; none: all that the cell uses."""
        if self.of.off:
            return
        chosen = self._chosen("save", objects)
        place = place_of(path)
        if place.suffix == tensor_files.SUFFIX:
            raise UsageError(
                f"save({str(path)!r}): a checkpoint is a folder. save({place.stem!r}, full=True) writes "
                f"{place.stem}/model.safetensors, and what going on needs beside it"
            )
        self._save(SaveRequest(place, chosen, full_format))

    def load(self, path: Any, objects: Mapping[str, Any], weights_only: bool = True) -> None:
        """`objects`: by name; none: all that the cell uses."""
        chosen = self._chosen("load", objects)
        source = self.opened(path, weights_only)
        uninterrupted(lambda: self._load(source, chosen, bool(objects)))

    def opened(self, path: Any, weights_only: bool) -> CheckpointSource:
        agree(self.of.finish)
        return open_checkpoint.together(place_of(path), self.say, weights_only)

    def is_missing(self, path: Any) -> bool:
        """Whether no rank sees anything there, or a checkpoint that was put aside."""
        place = place_of(path)
        seen = any(place.iterdir()) if place.is_dir() else place.exists()
        return not self.of.refused and not any(self._gather(seen or folder.replaced_one(place) is not None))

    def _chosen(self, call: str, objects: Mapping[str, Any]) -> CheckpointObjects:
        if self.of.refused:
            raise NotSupported(f"{call}(): {self.of.refused}")
        chosen = CheckpointObjects.of(objects or self.of.objects)
        if not chosen:
            raise UsageError(
                f"{call}(path): no model, optimizer or scheduler is used here. Name them: "
                f"{call}(path, model=model, optimizer=optimizer)"
            )
        return chosen

    def answer_request(self, request: int) -> None:
        """At the end of a step: save the weights for the notebook, apart from the cell's own checkpoints. The training
        goes on whatever goes wrong here."""
        try:
            if not self.of.refused and (chosen := CheckpointObjects.of(self.of.in_use())):
                _live_weights_write.finish()
                place = folder.answer_to(Path(self.of.live_weights_folder), request)
                self._save(SaveRequest(place, chosen, in_a_step=True), _live_weights_write)
        except Exception as error:  # whatever it is, it is said
            self.say(f"the notebook asked for the weights, and they could not be given: {error}")

    def save_if_due(self, schedule: SaveSchedule) -> None:
        """At the end of a step."""
        number = self._step(item for item in self.of.objects.values() if isinstance(item, Optimizer))
        if schedule.due(number) and number != self.of.saved and (chosen := CheckpointObjects.of(self.of.in_use())):
            self.of.saved = number
            place = schedule.to / f"step-{number:06d}"
            try:
                self._save(SaveRequest(place, chosen, in_a_step=True, keep=schedule.keep))
            except NotWritten as error:  # on all ranks
                self._say_unwritten(error)

    def late(self) -> NbtrainError | None:
        """Wait until the last checkpoint is written, and return its error. An earlier cell's error is only printed."""
        behind = self.writing.left_behind
        error = self.writing.finish(self.say)
        if error is not None and behind:
            self.say(str(error))
            return None
        if error is not None and error.at_interval:
            self._say_unwritten(error)
            return None
        return error

    def _say_unwritten(self, error: NbtrainError) -> None:
        """Nobody has asked for this checkpoint itself: training is worth more than that it is there."""
        if not self.of.said_unwritten:
            self.of.said_unwritten = True
            self.say(f"{error}; the cell goes on, and --save-every tries again")

    # --- saving ----------------------------------------------------------------------------------

    def _save(self, request: SaveRequest, writing: BackgroundWrite = _writing) -> None:
        late = self.late() if writing is self.writing else None
        made: list[Path] = []

        def make() -> None:
            try:
                writing.start(self._job(request, late, made))
            except BaseException as error:  # from here on the others count on what this rank writes
                for begun in made:
                    give_up(begun, self.rank, error)
                raise

        uninterrupted(make)

    def _job(self, request: SaveRequest, late: NbtrainError | None, made: list[Path]) -> WriteJob:
        """What this rank writes, settled by all ranks together. `made`: the folder is added as soon as it is known."""
        number = self._step(request.chosen.optimizers.values())
        with self._paused():
            content, holdings, told = self._collect(request, late, made)
            made[:] = [Path(told[0]["made"])]
            described = holdings.described()
            shares = owners(described, [answer["kept"] for answer in told])
            parts = snapshot(holdings, shares[self.rank])
        about = {
            "format": FORMAT,
            "tree": content.tree,
            "shapes": {key: (info.shape, info.dtype) for key, info in described.items()},
            "step": number,
            "loops": self.positions.state(request.in_a_step),
            "scale": None if self.scaling is None else (self.scaling.scale, self.scaling.good),
            "random": {
                "one": capture() if self.randomness is None else self.randomness.notebook_states(),
                "ranks": [answer["random"] for answer in told],
            },
        }
        packed = open_checkpoint.packed(about) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = int(self._gather(packed.numel())[0]) if request.full_format else packed.numel()
        described[ABOUT] = TensorInfo((length,), torch.uint8)
        if self.rank == 0:
            parts.append(RankPart(ABOUT, 0, packed))
        processes = [answer["process"] for answer in told]
        return WriteJob(
            place=request.place,
            made=made[0],
            rank=self.rank,
            parts=parts,
            said={
                "format": FORMAT,
                "kind": "full" if request.full_format else "sharded",
                "nbtrain": versions.installed("nbtrain") or "unknown",
                "torch": torch.__version__,
                "step": number,
                "saved": time.time(),
                "strategy": None if self.strategy is None else type(self.strategy).__name__,
                "ranks": self.world_size,
                "holds": [name for _, table in request.chosen.kinds() for name in table],
                "trains": folder.trained(content, described),
            },
            laid=tensor_files.layout(content.tree, described) if request.full_format else None,
            peers={
                rank: process if host == processes[0][0] else None
                for rank, (host, process) in enumerate(processes)
                if rank
            },
            keep=request.keep,
        )

    def check_folder(self, to: Path, objects: Mapping[str, Any]) -> None:
        """Before the first step: raise if the folder is another training's."""
        chosen = CheckpointObjects.of(objects)
        if not chosen or not any(self._gather(self.rank == 0 and bool(folder.at_intervals(to)))):
            return
        with self._paused():

            def check() -> None:
                if self.rank:
                    return
                try:
                    content = Content.of(chosen, self._names(chosen))
                except UsageError:  # a lazy layer has no shape yet; the first save looks again
                    return
                described = Holdings.of(content.tensors, self._pieces()).described()
                folder.refuse_anothers(to, folder.trained(content, described))

            agree(check)

    def _collect(
        self, request: SaveRequest, late: NbtrainError | None, made: list[Path]
    ) -> tuple[Content, Holdings, list[dict[str, Any]]]:
        """What this rank has, and what every rank tells. Raises on all of them what is wrong on any."""
        told: dict[str, Any] = {"error": None, "made": None, "kept": {}, "process": (platform.node(), os.getpid())}
        content, holdings = Content(), Holdings({})
        try:
            if late is not None:
                raise late
            content = Content.of(request.chosen, self._names(request.chosen))
            holdings = Holdings.of(content.tensors, self._pieces())
            told["kept"] = holdings.kept()
            told["digest"] = hashlib.sha256(repr(list(content.described().items())).encode()).hexdigest()
            told["random"] = self.randomness.state_dict() if self.randomness is not None else None
            if self.rank == 0:
                place = request.place
                place.parent.mkdir(parents=True, exist_ok=True)
                folder.tidy(place.parent)
                if place.exists() and folder.marker(place) is None and (place.is_file() or any(place.iterdir())):
                    raise UsageError(f"{place} is there already, and is no whole checkpoint: it is not overwritten")
                if request.keep is not None:
                    folder.refuse_anothers(place.parent, folder.trained(content, holdings.described()))
                made.append(folder.beside(place))
                made[0].mkdir()
                owe(made[0], range(1, self.world_size))
                told["made"] = str(made[0])
        except (NbtrainError, OSError) as error:
            told["error"] = error
        every = self._gather(told)
        failure = next((answer["error"] for answer in every if answer["error"] is not None), None)
        if failure is None and len({answer["digest"] for answer in every}) > 1:
            failure = NbtrainError(
                "the ranks do not hold the same tensors (a layer or an optimizer's state that exists on some only): "
                "this cannot be one checkpoint"
            )
        if failure is None and len({host for host, _ in (answer["process"] for answer in every)}) > 1:
            failure = self._unseen(Path(every[0]["made"]), every)
        if isinstance(failure, OSError):
            raise NotWritten(f"the checkpoint could not be written: {type(failure).__name__}: {failure}") from failure
        if failure is not None:
            raise failure
        return content, holdings, every

    def _unseen(self, made: Path, every: Sequence[Mapping[str, Any]]) -> NbtrainError | None:
        """What to raise where ranks of other machines do not see rank 0's folder: it would wait for them."""
        until = time.monotonic() + SEEN
        while not (there := made.is_dir()) and time.monotonic() < until:
            time.sleep(0.05)
        blind = [rank for rank, sees in enumerate(self._gather(there)) if not sees]
        if not blind:
            return None
        hosts = sorted({every[rank]["process"][0] for rank in blind})
        return UsageError(
            f"{made.parent} of {every[0]['process'][0]}, where rank 0 is, is not to be seen on {', '.join(hosts)}, and "
            "each rank writes its part of a checkpoint there: write the path of a folder that all machines share, or "
            "save in the notebook, after the cell: nbtrain.save(path, model=model)"
        )

    # --- loading ---------------------------------------------------------------------------------

    def _load(self, source: CheckpointSource, chosen: CheckpointObjects, asked: bool) -> None:
        match = self.restore(source, chosen, asked)
        if match.optimizers or not chosen.modules:
            self._go_on(source.about, chosen)

    def restore(self, source: CheckpointSource, chosen: CheckpointObjects, asked: bool) -> Match:
        """Load only what these objects hold. `asked`: the user named them."""
        names = self._names(chosen)
        with self._paused():
            match = agree(lambda: compare(source, chosen, names, asked))
            changing(lambda: self._restore(Restore(source, chosen, names, match)))
        return match

    def _restore(self, restore: Restore) -> None:
        restore.make_state(self._pieces())
        fits = restore.same_state(self._pieces())
        apart = self.components is not None and not all(self._gather(fits))
        if apart:
            self._take_apart(restore.objects)
            restore.names = self._names(restore.objects)
        restore.restore(open_checkpoint.reading(restore.source, self.say), self._pieces())
        if apart:
            assert self.components is not None
            self.components.prepare(
                {**self.of.objects, **{f"loaded {n}": o for n, o in enumerate(restore.objects.all())}}
            )

    def _take_apart(self, chosen: CheckpointObjects) -> None:
        """Close the components of these objects, so that they are whole until they are set up again."""
        assert self.components is not None
        wanted = {id(item) for item in chosen.all()}
        for kept in self.components.kept[:]:
            component = kept.prepared.component
            if any(id(item) in wanted for item in (*component.modules.values(), *component.optimizers.values())):
                self.components.close(kept)

    def _go_on(self, about: Mapping[str, Any], chosen: CheckpointObjects) -> None:
        """Go on from the checkpoint's steps, random states and loops."""
        if not about:
            return
        for optimizer in chosen.optimizers.values():
            done = self.steps.taken.get(optimizer, 0) if self.steps is not None else 0
            self.of.taken[optimizer] = about["step"] - done
        random = about["random"]
        if self.randomness is None:
            restore(random["one"])
        else:
            self.randomness.go_on(self.world_size, random["one"], random["ranks"])
        if self.scaling is not None and about.get("scale") is not None:
            self.scaling.scale, self.scaling.good = about["scale"]
        self.positions.go_on(about["loops"])
        self.of.resumed = self.of.resuming
        self.of.saved = about["step"]

    # --- both ------------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any]:
        return collectives.gather(value) if self.world_size > 1 else [value]

    def _paused(self) -> Any:
        return self.components.paused() if self.components is not None else nullcontext()

    def _pieces(self) -> dict[int, Any]:
        return {id(t): piece for t, piece in self.components.pieces()} if self.components is not None else {}

    def _names(self, chosen: CheckpointObjects) -> ParameterNames:
        """Names of parameters: of the models that are saved with them, else of any that is known."""
        known = {name: item for name, item in self.of.objects.items() if isinstance(item, torch.nn.Module)}
        for prepared in self.components.prepared if self.components is not None else ():
            known = {**prepared.component.modules, **known}
        return ParameterNames(chosen.modules, known)

    def _step(self, optimizers: Iterable[Optimizer]) -> int:
        """The number of steps in all cells: the optimizers' own count, or the one kept here."""
        counts = [0]
        for optimizer in optimizers:
            counts.append(self.of.taken.get(optimizer, 0) + (self.steps.taken.get(optimizer, 0) if self.steps else 0))
            known = (_number(state.get("step")) for state in list(optimizer.state.values()))
            counts.append(next((number for number in known if number is not None), 0))
        return max(counts)


def _number(value: Any) -> int | None:
    """A step count; None if it is unknown (NaN where the parameter is another rank's)."""
    if isinstance(value, torch.Tensor):
        with tensors.as_plain_tensors():  # what a strategy says of states that a cell reads is not meant here
            value = value.item() if value.numel() == 1 and not value.is_meta else None
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
