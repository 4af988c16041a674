"""The verbs of `%distributed`: each does one thing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.notebook import annexes
from nbtrain.notebook.magics.line.options import BY_NAME
from nbtrain.notebook.magics.line.parse import Request, instead
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.notebook.verb import Verb

NO_RANKS = "no ranks are running; a %%distributed cell starts them"


def run_verb(state: MagicsState, request: Request) -> str | None:
    """`%distributed start --devices 2`: the first word is the verb."""
    from nbtrain.notebook.magics.line.suggestions import of_others, which

    name, *more = (word.plain for word in request.words)
    verb = VERBS.get(name)
    if verb is None:
        hint = instead(request, state.notebook) or which(name, VERBS, ", ".join(VERBS))
        raise UsageError(f"there is no verb {name!r}{hint}")
    if more and not verb.names:
        raise UsageError(f"{name} takes no arguments, and got {' '.join(more)!r}")
    wrong = [option for option in request.given if not verb.has(BY_NAME[option])]
    if wrong or (request.own and not verb.own):
        flags = [*(BY_NAME[option].flag for option in wrong), *(() if verb.own else request.own)]
        takes = [option.flag for option in BY_NAME.values() if verb.has(option)]
        usage = f"%distributed {verb.usage}" if verb.own else "it takes none"
        listed = f"; it takes {', '.join(takes)}" if takes else f"; {usage}"
        hint = of_others(flags[0], takes) if len(flags) == 1 else ""
        raise UsageError(f"{name} has no option {', '.join(flags)}{hint or listed}")
    if isinstance(verb.do, str):
        said: str | None = annexes.verb(name)(state, request)
        return said
    return verb.do(state, request)


def runs_script(state: MagicsState, line: str, magic: str) -> bool:
    """Run a script, if the verb is `run`. Called before the line is read: the words behind the script are its own."""
    from nbtrain.notebook.magics import script_verb

    script = script_verb.asked(state, line)
    if script is not None:
        script_verb.run(state, script, magic)
    return script is not None


def _of_session(method: str) -> Callable[[MagicsState, Request], str | None]:
    """A verb that is a method of the session, where there is one."""

    def do(state: MagicsState, request: Request) -> str | None:
        said: str | None = NO_RANKS if state.session is None else getattr(state.session, method)()
        return said

    return do


def _status(state: MagicsState, request: Request) -> str:
    return "\n".join([str(_of_session("status")(state, request)), *(annexes.ask("runs that go on") or ())])


def _of_file(where: str) -> Callable[[MagicsState, Request], str | None]:
    """A verb with a file of its own beside this one, `file:function`: loaded when it is used."""

    def do(state: MagicsState, request: Request) -> str | None:
        said: str | None = resolve_name(f"{__package__}.{where}")(state, request)
        return said

    return do


def _start(state: MagicsState, request: Request) -> str | None:
    wanted = request.over(state.defaults)
    name = wanted.value("strategy")
    needs = []
    if name != "auto":
        chosen = Chosen.named(name, state.notebook)
        wanted = chosen.over(request, state.defaults)
        needs = [(f"--strategy {name}", chosen.needs)]
    state.opened().start(state.devices.pool(wanted, needs))
    # A cell without options should use the ranks that were just started, not replace them.
    return state.set_defaults(request) if request.given else None


def _stop(state: MagicsState, request: Request) -> str | None:
    try:
        if state.session is None:
            return NO_RANKS
        state.session.stop()
    finally:
        state.forget_ranks()
        doors = sys.modules.get("nbtrain.engines.remote.doors")
        if doors is not None:  # there are ranks on other machines, or were to be
            doors.let_go()
    return None


def _where(state: MagicsState, request: Request) -> str:
    return NO_RANKS if state.session is None else state.session.where(bool(request.value("locals")))


def _check(state: MagicsState, request: Request) -> str:
    words = " ".join(word.plain for word in request.words[1:]).replace(",", " ").split()
    for word in words:
        if not word.isidentifier():
            name = re.match(r"\w*", word)
            hint = f"; write {name[0]}" if name and name[0] in state.notebook else ""
            raise UsageError(f"check takes names of the notebook, not {word!r}{hint}")
    return repr(state.opened().check(words))


def _history(state: MagicsState, request: Request) -> None:
    from nbtrain.watch.runs.history import history

    wanted = [word.plain for word in request.words[1:]]
    number = wanted[0] if len(wanted) == 1 else ""
    if wanted and number != "all" and not number.isdecimal():
        raise UsageError(f"history takes the number of a run, or all, not {' '.join(wanted)!r}")
    runs: Any = history(all=bool(wanted))
    if number.isdecimal():
        try:
            runs = runs[int(number)]
        except IndexError as error:
            raise UsageError(f"{error}; %distributed history all has them all") from None
    state.shell.display_pub.publish({"text/plain": repr(runs), "text/html": runs._repr_html_()})


VERBS: Mapping[str, Verb] = {
    "status": Verb("status", _status, "ranks, devices, memory, and what lives on the ranks"),
    "start": Verb("start [options]", _start,
                  "starts the ranks now instead of at the first cell; its options become defaults", options=True),
    "stop": Verb("stop", _stop, "ends the ranks and frees their devices; the notebook keeps everything"),
    "restart": Verb("restart", _of_session("restart"), "new ranks in place of the ones that run"),
    "where": Verb("where [--locals]", _where,
                  "where each rank is: the line of which cell, and what it waits for; with --locals what the names of "
                  "its innermost calls hold", takes=("locals",)),
    "debug": Verb("debug [RANK]", _of_file("debug_verb:debug"),
                  "pdb on the rank whose error was shown, or on this one, where the last cell has failed: up, down, p, "
                  "l, w, a, q and any expression; %debug does the same", names=True),
    "recover": Verb("recover", _of_session("recover"),
                    "brings home the last step that a failed cell has left on the ranks"),
    "run": Verb("run [options] SCRIPT [ARGUMENTS]", _of_file("script_verb:behind_a_script"),
                "a script written for torchrun, with its arguments, on the ranks; it sees what a process of torchrun "
                "sees, and __main__ is the script", options=True, takes=("strategy", "precision"), names=True),
    "join": Verb("join [--hours H] [--slurm FILE] [--kubernetes FILE] [--nodes N] [--image NAME] [--force]",
                 _of_file("join_verb:join"),
                 "the line that lets another machine take part, for an hour or H of them, and which have joined; or a "
                 "file that starts N machines: for sbatch, or for kubectl (a TrainJob of Kubeflow). --devices and "
                 "--accelerator say what each has",
                 takes=("nodes", "devices", "accelerator", "python"), own=True),
    "check": Verb("check [NAMES]", _check,
                  "whether these names (default: all) can travel to the ranks, what would be sent, and what to change",
                  names=True),
    "strategies": Verb("strategies", _of_file("strategy_table:show"),
                       "what each strategy shards, what it lacks here, what is kept after a failure, its options; "
                       "presets"),
    "history": Verb("history [RUN|all]", _history,
                    "the runs of this notebook, or one of them in detail, or all: what they were, what they logged, "
                    "how they ended", names=True),
    **{name: verb for annex in annexes.TABLE.values() for name, verb in annex.verbs.items()},
    "doctor": Verb("doctor", lambda state, request: state.doctor(), "what is possible here, what is not, and why"),
    "help": Verb("help", lambda state, request: state.manual, "this manual; --help and -h show it, too"),
}  # fmt: skip
