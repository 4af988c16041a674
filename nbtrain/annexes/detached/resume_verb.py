"""`%distributed resume [RUN] [options]`: a new run goes on where a stopped one is, in this session or another; or from
the newest checkpoint of one that was lost, or has failed."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from nbtrain.annexes.detached.attach_verb import OWN, came_home, meant, take_home
from nbtrain.annexes.detached.detached_run import checkpoints, has_saved, home_line, same_versions
from nbtrain.annexes.detached.digests import digest
from nbtrain.annexes.detached.run_folders import GOES_ON, GONE_ON, PLACE, RunFolder, every_run
from nbtrain.annexes.detached.start import refuse, start
from nbtrain.annexes.detached.take_home import Homecoming
from nbtrain.base.errors import UsageError
from nbtrain.base.humanize import listed
from nbtrain.exchange.names.cell_names import analyse, reach
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.notebook.magics.cells import locate
from nbtrain.notebook.magics.line.parse import Request, parse
from nbtrain.notebook.magics.line.resolve import flags_under
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.notebook.run.elastic_cell import Rest, cut
from nbtrain.notebook.run.elastic_run import LEFT
from nbtrain.notebook.sync.captured_names import captured
from nbtrain.worker.checkpoints.folder import at_intervals
from nbtrain.worker.checkpoints.newest import lacking, load_newest

LATE = 60.0
"""Seconds from the last sign of a run until its last checkpoint may be written."""
DRAWN = "what each rank draws for itself, as dropout does, is drawn anew"


def resume(state: MagicsState, request: Request) -> None:
    word = request.argument("the number of one run")
    folder = meant(state, word, lambda run: run.state not in (GOES_ON, "done"))
    with folder.alone("resuming"):  # of two, the second finds the first one's run
        _resume(state, request, folder)


def _resume(state: MagicsState, request: Request, folder: RunFolder) -> None:
    about, end, notebook = folder.about, folder.end or {}, state.notebook
    if folder.state == GOES_ON:
        raise UsageError(f"{folder} goes on: %distributed runs stop {folder.number} stops it after a whole step")
    after = (folder.read(GONE_ON) or {}).get("run")
    if any(one.number == after and one.state == GOES_ON and _came_after(one, folder) for one in every_run()):
        raise UsageError(
            f"run {after} goes on from {folder} already: %distributed attach {after} shows it, %distributed runs stop "
            f"{after} ends it"
        )
    same_versions(folder)
    saved = None if end.get("goes_on") else _newest(folder)
    sent = (folder.read("sent.json") or {}).get("names", {})
    line = parse(str(about["whole_line"]), notebook)
    line = replace(request, words=()).over(line)
    known = flags_under(line.value("strategy"), notebook)  # another strategy has not the options of the one before
    line = replace(line, own={flag: word for flag, word in line.own.items() if flag in known or flag in request.own})
    cell = locate(state.shell, "distributed", str(line), str(about["source"]), None)
    spec = state.devices.run(line, Request(), notebook)
    data = [name for name in sent if name in notebook and _is_data(notebook[name])]
    if other := [name for name in data if sent.get(name) and digest(notebook[name]) != sent[name]]:
        raise UsageError(f"{listed(other)}: not the data that {folder} had: it would go on with other batches")
    refuse(spec, state)

    def rest_of(place: bytes, there: dict[str, Any]) -> Rest:
        return cut(cell, place, lambda part: captured(part, there, NameOrder(there), spec), there)

    def check(homecoming: Homecoming) -> None:
        """That the rest of the cell has what it needs, once the run's work is home."""
        needs(homecoming.afterwards, homecoming.kept)

    def needs(there: dict[str, Any], kept: Set[str]) -> set[str]:
        part = rest_of(folder.get(PLACE), there).cell
        captured(part, there, NameOrder(there), spec)
        reached = reach(analyse(part.code), notebook)
        found = {*reached.hard, *reached.soft}
        if wrong := kept & found:
            raise UsageError(
                f"{listed(sorted(wrong))}: the notebook has its own, and {folder} cannot go on with that: "
                f"del {min(wrong)}, and write this line again"
            )
        return found

    if saved is None:
        home = came_home.get(folder.key)
        reached = reach(analyse(cell.code), {**dict.fromkeys(home or ()), **notebook})
        missing = {*reached.hard, *reached.soft} - notebook.keys()
        if home is None or missing:
            take_home(state, folder, check, missing or None)
        if home is not None:  # a learning rate that was lowered since is what it is to go on with
            needed_now = needs(notebook, {name for name, known in home.items() if known == OWN}) & home.keys()
            if since := [name for name in home if name in needed_now and digest(notebook[name]) != home[name] != ""]:
                print(f"nbtrain: {listed(since)}: as the notebook has it, changed since {folder} came home")
        place, after = folder.get(PLACE), f"step {end['steps']:,}{LEFT if end['step_left'] else ''}"
    else:
        needed = captured(cell, notebook, NameOrder(notebook), spec)
        used = {name: notebook[name] for name in (*needed.hard, *needed.soft, *needed.writes) if name in notebook}
        if absent := lacking(str(checkpoints(folder)), used):
            raise UsageError(
                f"{folder} cannot be gone on from: its checkpoint has {listed(absent)}, made in its cell. Run those "
                f"lines in a cell above, then %distributed resume {folder.number}"
            )
        place = load_newest(str(checkpoints(folder)), int(about["since"]), used) or b""
        after = f"its checkpoint of step {saved:,}; what that does not hold is as the notebook has it"
    rest = rest_of(place, notebook)
    again = "" if rest.line else "; what stands above the loop is done again"
    print(f"nbtrain: it goes on after {after}{again}; {DRAWN}")
    for name in rest.anew:
        print(f"nbtrain: {name} begins anew, as the top of the loop's body has it")
    for name in (name for name in data if not sent.get(name)):
        print(f"nbtrain: {name}: whether it has the data that the run had cannot be told")
    run = start(state, line, Request(), rest.cell, (rest.place, int(about["batches"])))
    folder.write(GONE_ON, {"run": run.number})


def _newest(folder: RunFolder) -> int:
    """The step of the checkpoint that a run has left. Raises what is there, where none can be gone on from."""
    about = folder.about
    made = [said for _, said in (at_intervals(checkpoints(folder)) if has_saved(folder) else ())]
    made = [said for said in made if said.get("number", 0) > about.get("since", 0)]
    saved = made[-1]["step"] if made else None
    there = f"; load({str(checkpoints(folder))!r}) takes the newest checkpoint there, of step {saved}" if made else ""
    if made and made[-1].get("saved", 0) > folder.last_sign + LATE:
        raise UsageError(f"{folder} cannot be gone on from: there are checkpoints of another run since then{there}")
    if rival := next((one for one in every_run() if _came_after(one, folder) and _in_one_folder(one, folder)), None):
        raise UsageError(f"{folder} cannot be gone on from: {rival} has written into the same folder since{there}")
    if about.get("no_place"):
        raise UsageError(
            f"{folder} cannot be gone on from, as its loop does not know its place: {about['no_place']}{there}"
        )
    if saved is None or folder.state == "done":
        if folder.state == "done":
            raise UsageError(f"{folder} is done{home_line(folder)}")
        written = "" if about.get("save_to") else "; with --save-every 10m it would have written some"
        steps = (folder.end or {}).get("steps", 0) if folder.state == "failed" else 0
        first = f"; its {steps:,} steps are kept: %distributed attach {folder.number} brings them home" if steps else ""
        raise UsageError(f"{folder} cannot be gone on from: it is {folder.state}, without a checkpoint{written}{first}")
    return int(saved)


def _came_after(one: RunFolder, folder: RunFolder) -> bool:
    return bool(one.about.get("began", 0) > folder.about.get("began", 0))


def _in_one_folder(one: RunFolder, folder: RunFolder) -> bool:
    return bool(one.about.get("save_to")) and checkpoints(one) == checkpoints(folder)


def _is_data(value: object) -> bool:
    from torch.utils.data import DataLoader, Dataset

    return isinstance(value, DataLoader | Dataset)
