"""Reports on a cell when it is over, below its output: what differs between ranks, what stayed there, what to write."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import nbtrain.base.humanize as humanize
from nbtrain.base.errors import UsageError
from nbtrain.base.events import GROUP, ORDER, RESULT, WHOLE, Finished
from nbtrain.exchange.kinds.remedies import OF_A_BAR
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.sync.kept_handles import kept
from nbtrain.notebook.sync.notebook_side import NotebookSide

SAME_WORK = (
    "all {count} ranks computed the same gradients, so they did the work of one (the numbers are right). Give each its "
    "own samples: a DataLoader, which is shared out by itself, where its loop trains: model.train() before it, and not "
    "under no_grad; X[rank::world_size] of a whole data set; a Generator with manual_seed(seed + rank)"
)
OTHER_DATA = (
    "the data set of a loader is not the same on all ranks, and its batches were shared out all the same: if the cell "
    "has split it by rank, each rank has seen 1/{count} of its part. Leave the split out, or write --no-sampler"
)
SAME_STREAM = (
    "an iterable data set looks which rank it is on, so it is left alone, and it gives all {count} ranks the same "
    "samples. Let each take its own: itertools.islice(data, rank, None, world_size); one that does not look is "
    "dealt out"
)
OTHER_DRAWS = (
    "a sampler has drawn other samples on each rank, from random numbers of its own, so some were seen several times "
    "and others not at all. Let it draw from torch's or numpy's global state, or from a generator that is seeded alike"
)
OTHER_DIVISORS = (
    "each rank divides its loss by a number of its own (ignored targets, class weights, a mask, a mean of its losses), "
    "and gradients are averaged over the ranks, where one process divides all by one number. Bring that together: "
    'loss = total * world_size / reduce(count, "sum"), where total is the sum over this rank\'s samples and count what '
    "they count, (y != -100).sum() or weight[y].sum(); reduce(mean) for a mean"
)
OWN_GRADIENTS = (
    "torch.autograd.grad gives each rank the gradients of its own share of a batch. They are averaged where they are "
    "put into p.grad; what else is made of them (fast weights, a penalty, a norm) is of that share, and not what one "
    "process has. Write grads = [reduce(g) for g in grads], which can be differentiated again, unless each rank works "
    "on tasks of its own; %distributed verify says whether the cell gives what one process gives"
)
VERIFY = (
    "a number of each rank's own counts its share of the batches: %distributed verify shows one process's beside it, "
    "with the line to write"
)
OWN_RATES = (
    "{groups}: not the same on rank {ranks} as on rank {lead}, so that their steps leave different weights; rank "
    "{lead}'s came home. Each rank has its own loss: to decide by it, use `reduce(loss.item())`, the same number on all"
)
RETURNED = "what was returned"
"""Nobody has written the name that it has on the ranks."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)  # fmt: skip
"""Names that are assigned in these are not the cell's."""


class Reporter:
    """Says sentences about a cell, some of them only once."""

    def __init__(self, say: Callable[[str], object], known: set[tuple[str, str]], cell: Cell | None = None) -> None:
        """`known`: what was said already, as (text of a cell, or nothing, and the name of the sentence)."""
        self.say, self._known, self._cell = say, known, cell

    def once(self, name: str, sentence: str, of_this_cell: bool) -> None:
        key = self._cell.source if self._cell is not None and of_this_cell else "", name
        if key not in self._known:
            self._known.add(key)
            self.say(sentence)

    def worth_saying(self, names: list[str]) -> list[str]:
        """The names without loop variables, which hold each rank's last batch."""
        passing = loop_variables(self._cell.code) if names and self._cell is not None else frozenset()
        return [name for name in names if name not in passing and name != RESULT]


def report(side: NotebookSide, finished: Mapping[int, Finished], lead: int, said: Reporter) -> None:
    """Report on a cell that came home. What differs between ranks is sent again from the notebook."""
    done, say = finished[lead], said.say
    for note in done.notes:
        say(note)
    for name, sentence in work_advice(finished.values()).items():
        said.once(name, sentence, of_this_cell=True)
    for name, sentence in done.advice.items():
        said.once(name, sentence, of_this_cell=False)
    stayed: dict[str, list[str]] = {}
    for path, reason, known in done.home.stayed:
        if reason == OF_A_BAR and not known:  # the loop was all that it was for
            continue
        if known:
            say(f"{path}: what changed in it stays on the ranks, the notebook's is as it was: {reason}")
        else:
            named = RETURNED + path.removeprefix(RESULT) if path.startswith(RESULT) else path
            stayed.setdefault(reason, []).append(named)
    for reason, paths in stayed.items():
        where, handles = ("stays", "a handle for it") if len(paths) == 1 else ("stay", "handles for them")
        say(f"{humanize.listed(paths)} {where} on the ranks, the notebook has {handles}: {reason}")
    for reason in side.unchanged:
        say(f"{reason}; the notebook's is not changed")
    differing, edited = _differing(finished), _edited_apart(finished, lead)
    side.differs(differing)
    sentences = disagreements(finished, lead, caused=bool(edited))
    below = side.differ_at(edited) if edited else {}
    named = [*differing, *(name for name in below if name not in differing)] if below else differing
    if worth := said.worth_saying(named) if named else []:
        paths = [path for name in worth for path in ([name] if name in differing else below[name])]
        if told := [path for path in paths if not any(path in sentence for sentence in sentences)]:
            say(f"values differ across ranks: {humanize.listed(told)}; kept rank {lead}'s")
            if done.calls:
                said.once("verify", VERIFY, of_this_cell=False)
    if sentences:
        say("\n".join(sentences))
        side.resend()


def report_lost(side: NotebookSide | None, namespace: Mapping[str, Any]) -> None:
    """Say what is lost because the ranks end."""
    if side is not None and (lost := kept(side.table, namespace)):
        print(f"{humanize.listed(lost)}: lived on these ranks only, which are ended; to be made again")
    drop_ahead(side)


def report_partly_lost(side: NotebookSide, namespace: Mapping[str, Any], ranks: Iterable[int]) -> None:
    """Say what is lost because these ranks end, while the others live on."""
    if handles := kept(side.table, namespace):
        first = next(iter(handles))
        said = (
            f"{humanize.ranks(sorted(ranks))}'s is gone; bring home what the others have with {first} = {first}.pull()"
        )
        print(f"{humanize.listed(handles)}: {said}")


def drop_ahead(side: NotebookSide | None) -> None:
    """Drop what --keep left on the ranks: they get the notebook's objects again."""
    if side is not None and side.ahead:
        names = humanize.listed(sorted(side.ahead))
        print(f"{names}: what --keep had left on the ranks is dropped; the notebook's is as it was")
        side.ahead.clear()


def check_ahead(side: NotebookSide, parted_as: tuple[Any, ...]) -> None:
    """Raises where other options would drop what --keep left on the ranks."""
    if side.ahead:
        strategy, options, precision = parted_as
        given = f" {humanize.flags(options)}".rstrip() + (f" --precision {precision}" if precision != "32" else "")
        names = humanize.listed(sorted(side.ahead))
        raise UsageError(
            f"{names}: what --keep has left on the ranks is in pieces for -s {strategy}{given}. Bring it home with "
            f"a cell under the same options that reads {names}, or discard it with %distributed stop"
        )


def slow(name: str, value: Any, seconds: float) -> str:
    return (
        f"looking for changes in {name}, a {type(value).__name__} of {len(value):,}, took {seconds:.1f} s, and does so "
        "before each cell that reads it; an array, a tensor or a tuple of the same costs next to nothing"
    )


def _differing(finished: Mapping[int, Finished]) -> list[str]:
    """Names whose values differ across ranks."""
    values = [dict(done.values) for done in finished.values() if done.values is not None]
    if len(values) < 2:
        return []
    names = dict.fromkeys(name for of_rank in values for name in of_rank)
    return [name for name in names if len({of_rank.get(name) for of_rank in values}) > 1]


def _edited_apart(finished: Mapping[int, Finished], lead: int) -> set[int]:
    """Keys of known objects that some rank has edited otherwise than the lead, or alone."""
    expected = set(finished[lead].edited)
    return {key for done in finished.values() for key, _ in expected.symmetric_difference(done.edited)}


def disagreements(finished: Mapping[int, Finished], lead: int, caused: bool = False) -> list[str]:
    """Sentences about what should be equal on all ranks and is not. The others get the lead's with the next cell.
    `caused`: what else differs is said, and random numbers may have been drawn for it."""
    expected = dict(finished[lead].replica_checksums or ())
    differing: dict[str, list[int]] = {}
    for rank, done in finished.items():
        for name, number in done.replica_checksums or ():
            if expected.get(name, number) != number:
                differing.setdefault(name, []).append(rank)
    if groups := [name for name in differing if GROUP in name]:  # the reason for all the others
        ranks = sorted({rank for name in groups for rank in differing[name]})
        return [OWN_RATES.format(groups=humanize.listed(groups), ranks=", ".join(map(str, ranks)), lead=lead)]
    # A component is named only where none of its tensors is: not all ranks have looked at theirs.
    named = {name: ranks for name, ranks in differing.items() if WHOLE not in name} or dict(differing)
    if caused:
        named.pop(ORDER, None)
    return [
        f"rank {', '.join(map(str, ranks))} differs from rank {lead} in {name.replace(WHOLE, '')}; rank {lead}'s came "
        "home"
        for name, ranks in named.items()
    ]


def work_advice(finished: Iterable[Finished]) -> dict[str, str]:
    """Sentences on what the ranks did, by name: the same work, or work on different data."""
    ended = [done.compared for done in finished]
    count = len(ended)
    if count < 2 or not any(ended):  # most warm cells have nothing to compare
        return {}
    advice = {}
    work = {numbers.get("work") for numbers in ended}
    if len(work) == 1 and None not in work:
        advice["work"] = SAME_WORK.format(count=count)
    data = {numbers["data"] for numbers in ended if "data" in numbers}
    if len(data) > 1:
        advice["data"] = OTHER_DATA.format(count=count)
    if len({numbers["drawn"] for numbers in ended if "drawn" in numbers}) > 1:
        advice["drawn"] = OTHER_DRAWS
    streams = {numbers.get("stream") for numbers in ended}
    if len(streams) == 1 and None not in streams:
        advice["stream"] = SAME_STREAM.format(count=count)
    everywhere = set.intersection(*(set(numbers) for numbers in ended))
    differ = {name for name in everywhere if len({numbers[name] for numbers in ended}) > 1}
    if any(f"{name} for each" in differ for name in differ):
        advice["divisors"] = OTHER_DIVISORS
    if any(f"{name} by" in everywhere - differ for name in differ):  # not the same gradient of what is the same
        advice["own gradients"] = OWN_GRADIENTS
    return advice


def loop_variables(code: str) -> frozenset[str]:
    """Loop variables that are assigned nowhere else but in their own loop (`x = x.to(device)`)."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # a top-level await, say
        return frozenset()
    passing: set[str] = set()
    others: set[str] = set()
    _look(tree, frozenset(), passing, others)
    return frozenset(passing - others)


def _look(node: ast.AST, of_loops: frozenset[str], passing: set[str], others: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.For, ast.AsyncFor)):
            targets = frozenset(_stored(child.target))
            passing |= targets
            for part in (*child.body, *child.orelse):
                _look(ast.Module([part], []), of_loops | targets, passing, others)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            if child.id not in of_loops:
                others.add(child.id)
        elif not isinstance(child, SCOPES):
            _look(child, of_loops, passing, others)


def _stored(target: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
