"""`%distributed runs`: every detached run of this user, and what can be done with one."""

from __future__ import annotations

import nbtrain.base.humanize as humanize
from nbtrain.annexes.detached.detached_run import has_saved, told
from nbtrain.annexes.detached.run_folders import GOES_ON, RunFolder, every_run, find
from nbtrain.annexes.detached.runs_table import table
from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

ACTIONS = ("stop", "where", "kill")
USAGE = "%distributed runs [stop|where|kill RUN] [--drop RUN]"


def runs(state: MagicsState, request: Request) -> str:
    own = dict(request.own)
    drops = "--drop" in own
    dropped = own.pop("--drop", None)
    given = [word.plain for word in request.words[1:]]
    if own or (given and (drops or len(given) > 2 or given[0] not in (*ACTIONS, "drop"))):
        raise UsageError(f"runs takes one of these: {USAGE}")
    if drops:
        given = ["drop", dropped.plain if dropped is not None else ""]
    return done(given[0] if given else None, given[1] if given[1:] else "")


def done(action: str | None, run: str) -> str:
    """What is to be printed. `run`: the number as it is typed; empty: the newest."""
    if action is None:
        return table(every_run())
    folder = find(run)
    if action == "drop":
        return _drop(folder)
    said = told(folder, {"where": "stacks"}.get(action, action))
    if action == "kill":
        goes_on = f"%distributed resume {folder.number} goes on from its newest checkpoint"
        kept = f"what they have not saved is gone; {goes_on}" if has_saved(folder) else "nothing that they did is kept"
        return f"{folder}: its ranks are ended at once; {kept}"
    if action != "stop":
        return said
    return f"{folder} stops after this step: %distributed attach {folder.number} brings home its work"


def _drop(folder: RunFolder) -> str:
    if folder.state == GOES_ON:
        number = folder.number
        raise UsageError(
            f"{folder} has not ended yet: %distributed runs stop {number} ends it after a step, kill {number} at once, "
            "and a moment later this line drops it"
        )
    said = f"{folder} is dropped, with all that it has left: {humanize.size(folder.size)}"
    folder.remove()
    return said
