"""Compares what a cell gives under its strategy with what one process gives, by running its first steps both ways on
the same samples.

Where the numbers differ, further runs find out why: with the samples of each batch in the opposite order, which shows
what rounding alone does; without dropout; with the running statistics of batch norms.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

from nbtrain.annexes.planning.compare.receipt import (
    DIFFERS,
    EQUAL,
    EXPECTED,
    FAILED,
    UNKNOWN,
    Number,
    Receipt,
    WeightDifference,
)
from nbtrain.annexes.planning.trials.attempt import Attempt, RunWay
from nbtrain.base.errors import CannotTravel, CellSyntaxError, MissingName, NbtrainError, UsageError
from nbtrain.base.specs import Record, RunSpec, Trial
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.session import Session

CLOSE = 1e-4
"""relative difference, of a number or of what the steps moved a weight by, that counts as equal"""
ROUNDING = 8
"""difference in units of a type's epsilon that counts as equal, too"""
NOISE = 10
"""difference that counts as equal, too: times what one process differs by when samples come in another order"""


@dataclass(frozen=True, slots=True)
class Played:
    """What one run recorded."""

    ranks: tuple[Mapping[str, Any], ...]
    """one record for each share of the samples, in order"""
    weights: Mapping[str, Any]
    before: Mapping[str, Any]
    """the weights before the first step; of one process only"""
    steps: int

    @property
    def samples(self) -> Counter[Any]:
        return Counter(
            (number, epoch, key) for rank in self.ranks for number, epoch, keys in rank["samples"] for key in keys
        )

    @property
    def losses(self) -> list[float]:
        """The mean over the ranks, for each backward that all of them have run."""
        each = [rank["losses"] for rank in self.ranks]
        return [sum(values) / len(values) for values in zip(*each, strict=False)]


class TrialFailed(Exception):
    """One of the runs failed."""


def verify(session: Session, way: RunWay, cell: Cell, steps: int, told: Callable[[Receipt], None]) -> Receipt:
    """Run the first steps of the cell, and again as one process."""
    with session.trial(way.spec):
        return Verifying(Attempt(session.shell, session.ranks, cell, 0), way, steps, told).run()


class Verifying:
    """Makes one receipt."""

    def __init__(self, attempt: Attempt, way: RunWay, steps: int, told: Callable[[Receipt], None]) -> None:
        self._attempt = attempt
        self._way = way
        self._steps = steps
        self._tell = told
        self.receipt = Receipt(line=way.line)
        self._folder = Path()
        self._plays = 0

    def run(self) -> Receipt:
        """Compare, and return the receipt. Stop ends it; the notebook is as it was."""
        began = time.monotonic()
        found: dict[str, Any]
        self._folder = Path(tempfile.mkdtemp(prefix="nbtrain-verify-"))
        try:
            spec = self._attempt.spec_of(self._way)
            if spec.strategy == "none":
                raise UsageError(
                    "--strategy none touches nothing: its code shares out data and gradients by itself, and nothing "
                    "says what one process would see. Write the cell for one process, and verify it with -s ddp"
                )
            found = self._compare(spec)
        except TrialFailed as failed:
            found = {"state": FAILED, "causes": (str(failed),)}
        except (CannotTravel, MissingName, CellSyntaxError, UsageError):
            raise
        except NbtrainError as error:
            found = {"state": FAILED, "causes": (str(error).split("\n")[0],)}
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._note(seconds=time.monotonic() - began, doing="", **found)
        return self.receipt

    def _note(self, **changes: Any) -> None:
        self.receipt = replace(self.receipt, **changes)
        self._tell(self.receipt)

    # -- running ------------------------------------------------------------------------------------

    def _play(self, spec: RunSpec, doing: str, **how: Any) -> Played:
        self._note(doing=doing)
        self._plays += 1
        folder = self._folder / str(self._plays)
        folder.mkdir()
        names = self._attempt.reads(spec)
        record = Record(folder=str(folder), numbers=tuple(sorted(names.writes)), **how)
        home, _ = self._attempt.play(spec, Trial(steps=self._steps, warm=0, record=record))
        found = home.tried
        if not found:
            raise TrialFailed(f"{doing}: {home.why or 'it was cut short'}")
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(spec.pool.world_size)]
        shares = {rank["share"]: rank for rank in reversed(ranks)}
        steps = min(one.steps for one in found)
        weights, before = _load(folder / "after.pt"), _load(folder / "before.pt")
        return Played(tuple(shares[at] for at in sorted(shares)), weights, before, steps)

    def _alone(self, spec: RunSpec, shares: int, doing: str, **how: Any) -> Played:
        pool = replace(
            spec.pool, devices=spec.pool.devices[:1], uuids=spec.pool.uuids[:1], together=False, nodes=1,
            oversubscribe=False,
        )  # fmt: skip
        one = replace(spec, pool=pool, strategy="single", options={}, chosen=False)
        return self._play(one, doing, stands_for=shares, **how)

    # -- comparing ----------------------------------------------------------------------------------

    def _compare(self, spec: RunSpec) -> dict[str, Any]:
        """The verdict, as changes of the receipt."""
        self._note(strategy=spec.strategy, ranks=spec.pool.world_size)
        many = self._play(spec, f"playing it on {spec.pool.world_size} ranks")
        self._note(steps=many.steps)
        shares = len(many.ranks)
        one = self._alone(spec, shares, "playing it as one process")
        self._note(**_samples(many, one), losses=tuple(zip(many.losses, one.losses, strict=False)))
        self._note(weights=compared(many, one), numbers=numbers(many, one))
        if self.receipt.samples_agree and not self._agree() and steady(many, one):
            turned = self._alone(spec, shares, "playing it as one process, samples in another order", turned=True)
            if in_any_order(one, turned):
                self._note(weights=compared(many, one, turned))
        if self.receipt.samples_agree and self._agree():
            found: dict[str, Any] = {"state": EQUAL, "causes": self._own_numbers()}
        else:
            found = self._explain(spec, many, one)
        # One process has stood in with batches as large, so its schedules count the same steps.
        if later := tuple(f"not within these steps: {sentence}" for sentence in many.ranks[0]["said"]):
            found = {
                "state": found["state"] if found["state"] == UNKNOWN else DIFFERS,
                "causes": later + found["causes"],
            }
        return found

    def _agree(self) -> bool:
        return all(weight.equal for weight in self.receipt.weights)

    def _own_numbers(self) -> tuple[str, ...]:
        names = [number.name for number in self.receipt.numbers if number.how == "sum"]
        if not names:
            return ()
        return (f"{', '.join(names)}: each rank counts its own samples; what the cell shows of it is one rank's",)

    def _explain(self, spec: RunSpec, many: Played, one: Played) -> dict[str, Any]:
        """Why they differ."""
        if expected := self._of_switches(spec, one):
            return {"state": EXPECTED, "causes": tuple(expected)}
        causes = self._of_samples(many)
        if not causes:
            causes = [*_of_losses(many, one), *_of_random(many)]
        state = UNKNOWN if not many.samples and any(rank["drew"] for rank in many.ranks) else DIFFERS
        return {"state": state, "causes": tuple(causes or [_where(many, one)])}

    def _of_samples(self, many: Played) -> list[str]:
        if self.receipt.samples_agree:
            return []
        first, *others = (Counter(map(str, rank["samples"])) for rank in many.ranks)
        if others and all(other == first for other in others):
            return [
                f"cause: all {len(many.ranks)} ranks saw the same samples. Iterable data is left alone: let each rank "
                "take its own, itertools.islice(data, rank, None, world_size)"
            ]
        return [
            "cause: the ranks saw other samples than one process. If your code gives each rank its own part of the "
            "data, --no-sampler leaves that as it is. If it draws the order by itself, draw it from a generator with "
            "a seed: DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0))"
        ]

    def _of_switches(self, spec: RunSpec, one: Played) -> list[str]:
        """Causes that are expected on several ranks: with dropout and batch norm switched off, do both ways agree?"""
        here = [name for name in ("dropout", "batch norm") if any(rank[name] for rank in one.ranks)]
        if not here or not self.receipt.samples_agree:
            return []
        for names in [(name,) for name in here] + ([tuple(here)] if len(here) > 1 else []):
            said = f"without {' and '.join(names)}"
            ours = self._play(spec, f"playing it on the ranks {said}", without=names)
            shares = len(ours.ranks)
            alone = self._alone(spec, shares, f"playing it as one process {said}", without=names)
            weights = compared(ours, alone)
            if not all(weight.equal for weight in weights) and steady(ours, alone):
                noise = self._alone(spec, shares, f"the same {said}, in another order", without=names, turned=True)
                weights = compared(ours, alone, noise if in_any_order(alone, noise) else None)
            if all(weight.equal for weight in weights):
                return [f"cause: {CAUSES[name]}" for name in names] + [f"{said}, both ways give the same weights"]
        return []


def _load(file: Path) -> Mapping[str, Any]:
    import torch

    if not file.exists():
        return {}
    found: Mapping[str, Any] = torch.load(file, mmap=True, weights_only=True)
    return found


def steady(many: Played, one: Played) -> bool:
    """Whether nothing is drawn, so that samples in another order give the same but for rounding."""
    return not any(rank["drew"] for rank in many.ranks) and not any(rank["dropout"] for rank in one.ranks)


def in_any_order(one: Played, turned: Played) -> bool:
    """Whether the order of the samples in a batch does not matter: the first loss, of untouched weights, is the same.
    Otherwise the difference is not rounding."""
    return bool(one.losses) and bool(turned.losses) and isclose(one.losses[0], turned.losses[0], rel_tol=CLOSE)


def compared(many: Played, one: Played, noise: Played | None = None) -> tuple[WeightDifference, ...]:
    """The difference of each weight, by name. `noise`: the same as `one`, with another rounding."""
    import torch

    def distance(a: Any, b: Any) -> float:
        if a.shape != b.shape:
            return float("inf")
        if not a.numel():
            return 0.0
        if not (a.is_floating_point() or a.is_complex()):
            a, b = a.long(), b.long()
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        return float(torch.where(a == b, 0.0, (a - b).abs()).max())  # infinities that agree are equal

    found = []
    for name, alone in one.weights.items():
        if name not in many.weights:
            found.append(WeightDifference(name=name, difference=float("inf"), moved=0.0, allowed=0.0))
            continue
        moved = distance(alone, one.before[name]) if name in one.before else 0.0
        scale = float(alone.abs().max()) if alone.numel() and alone.dtype != torch.bool else 0.0
        smallest = torch.finfo(many.weights[name].dtype).eps if many.weights[name].is_floating_point() else 0.0
        allowed = CLOSE * moved + ROUNDING * smallest * scale
        if noise is not None and name in noise.weights:
            allowed = max(allowed, NOISE * distance(alone, noise.weights[name]))
        found.append(
            WeightDifference(name=name, difference=distance(alone, many.weights[name]), moved=moved, allowed=allowed)
        )
    return tuple(found)


def numbers(many: Played, one: Played) -> tuple[Number, ...]:
    """Names whose number differs on rank 0, where the ranks' sum or mean is what one process has."""
    found = []
    for name, alone in one.ranks[0]["numbers"].items():
        each = tuple(rank["numbers"][name] for rank in many.ranks if name in rank["numbers"])
        if len(each) != len(many.ranks) or len(each) == 1 or _close(each[0], alone):
            continue
        if _close(sum(each), alone):
            found.append(Number(name=name, ranks=each, alone=alone, how="sum"))
        elif _close(sum(each) / len(each), alone):
            found.append(Number(name=name, ranks=each, alone=alone, how="mean"))
    return tuple(found)


def _close(a: float, b: float) -> bool:
    return a == b or isclose(a, b, rel_tol=CLOSE, abs_tol=1e-9)


def _samples(many: Played, one: Played) -> dict[str, Any]:
    ours, alone = many.samples, one.samples
    if not alone and not ours:
        return {"samples": "no loader gives the cell its batches", "samples_agree": True}
    missing, extra = sum((alone - ours).values()), sum((ours - alone).values())
    total = sum(alone.values())
    if not missing and not extra:
        often = sum(count - 1 for count in ours.values() if count > 1)
        filled = (
            f"; {often} of them twice, so that every rank got as many: DataLoader(..., drop_last=True) leaves the "
            "uneven last batches out"
            if often
            else ""
        )
        return {"samples": f"{total:,}, each as often as in one process{filled}", "samples_agree": True}
    said = f"{missing:,} of the {total:,} that one process sees were seen by no rank"
    if extra:
        said += f", {extra:,} more often than there"
    return {"samples": said, "samples_agree": False}


def _of_losses(many: Played, one: Played) -> list[str]:
    """The first loss, of untouched weights, shows by its size that it is a sum over the batch."""
    if not many.losses or not one.losses or len(many.ranks) == 1:
        return []
    ours, alone = many.losses[0], one.losses[0]
    if ours and not _close(ours, alone) and isclose(ours * len(many.ranks), alone, rel_tol=1e-3):
        return [
            f"cause: the loss is a sum over the batch ({ours:.6g} on a rank, {alone:.6g} in one process). Gradients of "
            "the ranks are averaged, so these are too small: divide the loss by the number of samples, or take a loss "
            'with reduction="mean"'
        ]
    return []


def _of_random(many: Played) -> list[str]:
    if not any(rank["drew"] for rank in many.ranks):
        return []
    if not many.samples:
        return [
            "cause: the cell draws its batches by itself, and each rank draws its own: several ranks see several "
            "batches where one process sees one. With a DataLoader it can be compared"
        ]
    return [
        "likely cause: random numbers that the cell or the model draws (noise, augmentation, sampling): each rank "
        "draws its own"
    ]


def _where(many: Played, one: Played) -> str:
    first = next(
        (at for at, (a, b) in enumerate(zip(many.losses, one.losses, strict=False)) if not isclose(a, b, rel_tol=1e-3)),
        None,
    )
    if first == 0:
        return COUPLED
    if first is None:
        return "the losses agree, the weights do not: look at what the cell does with weights, gradients or optimizer"
    return f"the losses part at backward {first + 1}: look at what the cell does after backward {first}"


COUPLED = (
    "the first loss differs already. Possible cause: the loss couples the samples of a batch (contrastive, dice, a "
    "top-k or a quantile over the batch): of its own samples alone each rank computes another one. "
    "z = torch.cat(gather(z, sync_grads=True)) before the loss makes it of the whole batch, and so do -s ddp2 and "
    "-s dp. Otherwise what forward computes is another thing on the ranks"
)
CAUSES = {
    "dropout": "dropout drops other units on each rank than in one process",
    "batch norm": (
        "batch norm normalises each rank's own samples; in one process, all of a batch. With larger batches the "
        "difference vanishes; torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) removes it"
    ),
}
