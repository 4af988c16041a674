"""Random training programs: a model, an optimizer, a loop, and edits at drawn places of it, as the text of a notebook.

A program is data, drawn from a seed: `draw(seed, number)` is always the same one, whatever came before it. Any of its
edits can be left out (`without`), which is how a failure is made small.
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, replace

from tests.fuzz.architectures import ARCHITECTURES, Architecture
from tests.fuzz.edits import KINDS, Edit
from tests.fuzz.loops import LOOPS, OPTIMIZERS, Loop

PRELUDE = """
import copy, io, torch, torch.nn as nn, torch.nn.functional as F, torch.utils.checkpoint, torch.optim.swa_utils
from torch.utils.data import DataLoader, TensorDataset
from nbtrain import whole
""".strip()

WITHIN = re.compile(r"backward\(|step\(|hook|zero_grad|sched|in valid|^ *model\.to|^with torch.no_grad\(\): out", re.M)
"""What an edit does that does not belong into a block of complete tensors: it runs the loop's own calls, or goes
through batches."""
OF_GRADIENTS = re.compile(r"with torch\.no_grad\(\):(\n.*\n?.*p\.grad)")
"""Lines of a loop that read gradients."""
IN_NOTEBOOK = ("notebook", "setup")
IN_LOOP = ("batch", "loss", "grad", "step", "zero")
GUARDS = ("", "", "", "if i == 1:", "if i % 2:", "if epoch == 0 and i == 2:")


@dataclass(frozen=True, slots=True)
class Placed:
    """An edit at a place of one of the cells."""

    edit: str
    text: str
    place: str
    first: str = ""
    first_place: str = "setup"
    whole: str = ""
    """what does it with complete tensors, where that is not the same in a block"""
    whole_at: str = ""
    whole_first: str = ""


@dataclass(frozen=True, slots=True)
class Training:
    """A `%%distributed` cell, and what the notebook does before it."""

    loop: str
    epochs: int
    edits: tuple[Placed, ...]
    whole: bool = False
    """whether the loop itself has its weights and gradients in a block"""


@dataclass(frozen=True, slots=True)
class Program:
    seed: str
    architecture: str
    optimizer: str
    shuffle: bool
    cells: tuple[Training, ...]

    @property
    def text(self) -> list[tuple[bool, str]]:
        """(whether it is distributed, its code) of each cell of the notebook."""
        found = [(False, self._begin())]
        for number, cell in enumerate(self.cells):
            if before := _at(cell, _before(number)):
                found.append((False, before))
            found.append((True, _training(cell)))
        return [(distributed, f"{text}\npass") for distributed, text in found]  # no last value that would be shown

    def _begin(self) -> str:
        architecture = ARCHITECTURES[self.architecture]
        body = architecture.body.rstrip()
        definition = [f"class Net(nn.Module):\n{body}"] if body else []
        return "\n".join(
            [
                PRELUDE, *definition, f"torch.manual_seed({int(self.seed.split('/')[0]) % 1000})", architecture.data,
                "Y = torch.randint(3, (32,))",
                f"loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle={self.shuffle})", architecture.made,
                f"opt = {OPTIMIZERS[self.optimizer]}" if self.optimizer else "",
                *[_filled(LOOPS[cell.loop].first, *self.cells) for cell in self.cells[:1] if LOOPS[cell.loop].first],
                "result, history = {}, []",
            ]
        ).replace("\n\n", "\n")  # fmt: skip

    @property
    def edits(self) -> list[tuple[int, int]]:
        return [(c, e) for c, cell in enumerate(self.cells) for e in range(len(cell.edits))]

    def without(self, at: tuple[int, int]) -> Program:
        """The same with one edit less."""
        cells = list(self.cells)
        left = tuple(one for e, one in enumerate(cells[at[0]].edits) if e != at[1])
        cells[at[0]] = replace(cells[at[0]], edits=left)
        return replace(self, cells=tuple(cells))

    def with_whole(self) -> Program:
        """The same, with each edit that only reads and writes in a block `with whole(…)`."""
        return replace(self, cells=tuple(
            replace(cell, whole=True, edits=tuple(_within(one, LOOPS[cell.loop]) for one in cell.edits))
            for cell in self.cells
        ))  # fmt: skip

    def simpler(self) -> list[Program]:
        """The same with one thing less, the largest first."""
        found = []
        if len(self.cells) > 1:
            found += [replace(self, cells=self.cells[:-1])]
            found += [replace(self, cells=self.cells[1:])] if self.cells[0].loop == self.cells[1].loop else []
        found += [self.without(at) for at in self.edits]
        for number, cell in enumerate(self.cells):
            easier = [replace(cell, epochs=1)] if cell.epochs > 1 else []
            easier += [replace(cell, loop="plain")] if cell.loop != "plain" and self.optimizer else []
            found += [replace(self, cells=(*self.cells[:number], c, *self.cells[number + 1 :])) for c in easier]
        if self.shuffle:
            found.append(replace(self, shuffle=False))
        found += [replace(self, optimizer=name) for name in ("SGD", "SGD with momentum", "Adam")
                  if self.optimizer and _rank(self.optimizer) > _rank(name)]  # fmt: skip
        if (plain := self.of("layers")) is not None:
            found.append(plain)
        return found

    def of(self, name: str) -> Program | None:
        """The same with another architecture, where all that it speaks of is there too."""
        if self.architecture == name:
            return None
        old, new = ARCHITECTURES[self.architecture], ARCHITECTURES[name]

        def named(text: str) -> str:
            for field in ("weight", "other", "layer"):
                text = text.replace(_path(getattr(old, field)), f"\0{field}\0")
            return re.sub("\0(.*?)\0", lambda match: _path(getattr(new, match[1])), text)

        cells = tuple(
            replace(c, edits=tuple(replace(e, text=named(e.text), first=named(e.first)) for e in c.edits))
            for c in self.cells
        )
        return replace(self, architecture=name, cells=cells)

    def __str__(self) -> str:
        """As it would be typed."""
        return "\n\n".join(f"# {'%%distributed' if distributed else 'notebook'}\n{t}" for distributed, t in self.text)


def _rank(optimizer: str) -> int:
    return list(OPTIMIZERS).index(optimizer)


def _path(path: str) -> str:
    """`0.weight` as it is written behind a model: `model[0].weight`."""
    return re.sub(r"\.(\d+)\b", r"[\1]", f"model.{path}")


# --- drawn ---------------------------------------------------------------------------------------


def draw(seed: int, number: int) -> Program:
    choose = random.Random(f"{seed}/{number}")
    names = [*ARCHITECTURES]
    name = choose.choice(names)
    loop = choose.choices([*LOOPS], [one.weight for one in LOOPS.values()])[0]
    while LOOPS[loop].smooth and not ARCHITECTURES[name].smooth:
        name = choose.choice(names)
    optimizer = "" if LOOPS[loop].brings_optimizer else choose.choice([*OPTIMIZERS])
    cells = []
    for cell in range(choose.choice((1, 2, 2))):
        edits = [_placed(choose, ARCHITECTURES[name], LOOPS[loop], cell) for _ in range(choose.choice((1, 2, 2, 3, 4)))]
        cells.append(Training(loop, choose.choice((1, 2)), tuple(one for one in edits if one)))
    shuffle = choose.random() < 0.5 and name != "BatchNorm"
    return Program(f"{seed}/{number}", name, optimizer, shuffle, tuple(cells))


def _placed(choose: random.Random, architecture: Architecture, loop: Loop, cell: int) -> Placed | None:
    kind = choose.choices(KINDS, [weight for weight, _ in KINDS])[0][1]
    edit: Edit = choose.choice(kind)
    places = [one for one in edit.at.split() if one in _places(loop, cell)]
    if not places or (edit.smooth and not architecture.smooth):
        return None
    if "copied together" in edit.name and "opt.step" not in loop.text:
        return None  # docs/strategies.md: trained by hand, each rank trains its own, and the cell says that they differ
    place, guard = choose.choice(places), choose.choice(GUARDS)
    first_place = choose.choice((_before(cell), "top" if place not in ("setup", "notebook") else place))
    fields = {
        "w": _path(architecture.weight), "o": _path(architecture.other), "l": _path(architecture.layer),
        "c": str(choose.choice((0.5, 0.9, 1.1))), "n": str(choose.randrange(1, 1000)),
    }  # fmt: skip
    text, first = edit.text.format(**fields), edit.first.format(**fields)
    if place == "grad" and "def closure" in loop.text:
        text = text.replace("continue", "return loss")  # the place is inside of the closure
    if place in IN_LOOP and guard:
        text = f"{guard}\n{textwrap.indent(text, '    ')}"
    whole, whole_first = edit.whole.format(**fields), edit.whole_first.format(**fields)
    return Placed(edit.name, text, place, first, first_place, whole, edit.whole_at, whole_first)


def _before(cell: int) -> str:
    return "notebook" if cell else "setup"


def _places(loop: Loop, cell: int) -> set[str]:
    return {*re.findall(r"\[(\w+)\]$", loop.text, re.M), "top", "bottom", _before(cell)}


def _within(placed: Placed, loop: Loop) -> Placed:
    if placed.whole and not ("setup(" in placed.whole and placed.place in IN_NOTEBOOK):
        place = placed.whole_at or placed.place
        if place not in _places(loop, 1) | {"setup"} and f"[{place}]" not in loop.first:
            return placed
        return replace(
            placed, text=placed.whole, place=place, first=placed.whole_first or placed.first, first_place="top"
        )
    first, text = placed.first, placed.text
    if placed.first_place == "top" and first and not WITHIN.search(first):
        first = f"with whole():\n{textwrap.indent(first, '    ')}"
    if placed.place not in IN_NOTEBOOK and not WITHIN.search(text) and not (placed.place == "loss" and "loss" in text):
        line = "with whole(gradients=True):" if placed.place == "grad" else "with whole():"
        text = f"{line}\n{textwrap.indent(text, '    ')}"
    return replace(placed, first=first, text=text)


# --- written -------------------------------------------------------------------------------------


def _training(cell: Training) -> str:
    """The loop, with everything at its place."""
    lines = [_at(cell, "top")]
    text = LOOPS[cell.loop].text.strip("\n").format(epochs=cell.epochs)
    if cell.whole:
        text = OF_GRADIENTS.sub(r"with whole(gradients=True), torch.no_grad():\1", text)
        text = re.sub("^opt = ", "with whole(): opt = ", text)
    lines += [_filled(text, cell), _at(cell, "bottom")]
    return "\n".join(line for line in lines if line.strip())


def _filled(text: str, *cells: Training) -> str:
    """With the edits of these cells at its places."""

    def edits(place: re.Match[str]) -> str:
        return textwrap.indent("\n".join(filter(None, (_at(cell, place[2]) for cell in cells))), place[1])

    return re.sub(r"\n\s*\n", "\n", re.sub(r"(?m)^( *)\[(\w+)\]$", edits, text)).strip("\n")


def _at(cell: Training, place: str) -> str:
    found = [one.first for one in cell.edits if one.first and one.first_place == place]
    return "\n".join([*found, *(one.text for one in cell.edits if one.place == place)])
