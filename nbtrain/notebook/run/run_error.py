"""What a run that failed or was stopped raises, and whether its last step is kept for `%distributed recover`.

That a rank has died is noticed in `pool/rank_talk.py`; `stop_ranks.py` ends the ranks that wait for it, and
`pool/pool_manager.py` starts another in its place.
"""

from __future__ import annotations

import pickle

from nbtrain.base.events import Failed
from nbtrain.notebook import annexes
from nbtrain.notebook.run.run_state import RunState
from nbtrain.notebook.sync.notebook_side import NotebookSide

APART = (
    "Each rank has only its piece of the model, and they stand at different steps: nothing of them can be brought "
    "home. --save-every keeps checkpoints for such a case."
)

LOST = (
    "With its machine the run has lost its ranks, and the others begin anew. --nodes MIN:MAX has a run go on, if its "
    "loop is over resumable(…)."
)

KEPT = (
    "Step {steps:,} was kept: %distributed recover restores it. Another cell that trains the same objects to its end "
    "discards it."
)

INSTEAD = " It takes the place of step {steps:,} of the cell that failed before."

STILL = "Step {steps:,} of the cell that failed before is still kept: %distributed recover restores it."

GONE = (
    "Each rank has only its piece of the model, and not all are left: nothing of it can be brought home. --save-every "
    "keeps checkpoints for such a case."
)


def keeps_step(run: RunState, side: NotebookSide, together: bool) -> tuple[bool, str]:
    """Whether what is left on the ranks is kept, and what the user is told of it. `together`: it failed on the way home
    of what each has a piece of."""
    outcome, ranks, steps = run.outcome, run.ranks, run.outcome.steps
    keeps = bool(steps) and run.spec.pool.start != "fork" and not run.stopped
    said = KEPT.format(steps=steps) if keeps else ""
    if any(death.machine for death in ranks.deaths):
        keeps, said = False, LOST
    elif outcome.in_pieces and (ranks.gone or outcome.lost_cards):
        keeps, said = False, GONE
    elif together:
        keeps, said = False, ""
    elif outcome.in_pieces and not outcome.at_one_step:
        keeps, said = False, APART
    if (earlier := ranks.kept_step.run) is None:
        return keeps, said
    before = earlier.outcome.steps
    if keeps and (steps >= before or not earlier.held.holds_any(side.table.nodes.values())):
        return True, said + INSTEAD.format(steps=before)
    still = STILL.format(steps=before)
    return False, still if keeps else f"{said} {still}".strip()


def run_error(run: RunState, side: NotebookSide, stuck: set[int], kept: str, keeps: bool = False) -> BaseException:
    """`stuck`: ranks that have not ended. `kept`: what `keeps_step` says of the last step."""
    ranks, names = run.ranks, run.names
    reads = (*names.hard, *names.soft)

    def less() -> str:
        """What needs less memory."""
        from nbtrain.notebook.report.oom_report import LESS

        asked = names, run.shell.user_ns, run.spec, ranks.pids, keeps
        return str(annexes.ask("out of memory", *asked) or LESS)

    def hinted(failed: Failed) -> str:
        from nbtrain.notebook.report.error_hints import hint
        from nbtrain.notebook.report.oom_report import ran_out, readings

        if ran_out(failed) and ranks.pool is not None:
            return readings(run.memory, ranks.pool.pids(), less())
        return hint(failed, run.shell.user_ns, reads, side, names.writes)

    if deaths := ranks.deaths:
        return ranks.died(deaths, {death.rank: run.relay.tail(death.rank) for death in deaths}, kept, less)
    if not run.fault:
        how, why = "killed" if run.killed else "stopped", f". {kept}" if kept else ""
        return KeyboardInterrupt(f"{how}; the notebook is as it was before this cell{why}")
    from nbtrain.notebook.report import exception_message  # on use: nothing is loaded at a Stop

    return exception_message.exception(
        run.outcome.failed, stuck, run.spec.pool.world_size, kept,
        lambda rank, packed: side.open_alone(rank, pickle.loads(packed), "exception"), hinted, ranks.numbers(),
    )  # fmt: skip
