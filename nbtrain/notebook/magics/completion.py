"""Tab on a magic's line: option names, their choices, the flags of the chosen strategy, verbs and ranks.

`complete` decides what fits; two thin adapters bring it to IPython: a matcher of today, and one from before 8.6.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

from nbtrain.machine import registry
from nbtrain.notebook.magics.line.options import BY_FLAG, OPTIONS, Option
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.line.split_line import Word, split
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.notebook.magics.verbs import VERBS
from nbtrain.strategies import presets

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbtrain.notebook.magics.line.strategy_flags import Flag

NOTHING: tuple[str, list[str]] = ("", [])


def complete(left: str, state: MagicsState, names: Mapping[str, str]) -> tuple[str, list[str]]:
    """(what is typed of the word, what the word may become) for a line up to the cursor."""
    magic = re.match(r"\s*(%%?)(\w+)\s", left)
    if not magic or magic[2] not in names.values():
        return NOTHING
    is_rank = magic[2] == names["rank"]
    rest = left[magic.end() :]
    words = split(rest, unfinished=True)
    typed = words.pop() if words and words[-1].start + len(words[-1].text) == len(rest) else None
    if typed is None and rest.strip() and not rest[-1].isspace():
        return NOTHING  # in a comment
    fragment = typed.text if typed is not None else ""
    flag, equals, value = fragment.partition("=")
    if equals and typed is not None and typed.is_flag:
        words, fragment = [*words, Word(flag)], value
    own = _own_flags(words, state)
    before = words[-1].text if words else ""
    if (listed := _listed(before, fragment, state)) is not None:
        return fragment, listed
    if (choices := _values(before, own, state)) is not None:
        candidates: Iterable[str] = choices
    elif magic[1] == "%" and not is_rank:
        verb = words[0].text if words and words[0].text in VERBS else None
        if verb is not None and VERBS[verb].names and not fragment.startswith("-"):
            if verb == "debug":
                ranks = [str(rank) for rank in range(state.world_size() or 0)] if len(words) == 1 else []
                return fragment, [rank for rank in ranks if rank.startswith(fragment)]
            if verb == "history":
                return fragment, [run for run in _runs() if run.startswith(fragment)] if len(words) == 1 else []
            return _names(fragment, [word.text for word in words], state, models=verb == "plan")
        candidates = [*(VERBS if not words else []), *_flags(words, {} if verb else own, fragment, verb)]
    elif is_rank and not fragment.startswith("-") and not any(word.is_flag for word in words):
        candidates = [*_ranks(fragment, state), *(_flags(words, own, fragment) if words and not fragment else [])]
    else:
        candidates = _flags(words, own, fragment)
    return fragment, [candidate for candidate in candidates if candidate.startswith(fragment)]


def _values(before: str, own: Mapping[str, Flag], state: MagicsState) -> list[str] | None:
    """Values that an option may take. None: it takes none, so the next word is an option."""
    option = BY_FLAG.get(before)
    if option is not None:
        if option.read is None:
            return None
        return _strategies(state) if option.name == "strategy" else list(option.choices)
    if before in own and own[before].type is not bool:
        return list(own[before].choices)
    return None


def _listed(before: str, fragment: str, state: MagicsState) -> list[str] | None:
    """What an option of strategies or names, with commas between them, may go on with. None: it is another."""
    option = BY_FLAG.get(before)
    name = option.name if option is not None else ""
    if name in ("keep", "batch"):
        return _names(fragment, [], state)[1]
    if name != "compare":
        return None
    head, comma, typed = fragment.rpartition(",")
    taken = head.split(",")
    return [
        f"{head}{comma}{strategy}"
        for strategy in _strategies(state)
        if strategy not in taken and strategy.startswith(typed)
    ]


def _runs() -> list[str]:
    from nbtrain.watch.runs.history import history  # on use: files are read for it

    return ["all", *(str(run.number) for run in reversed(history()))]


def _flags(words: list[Word], own: Mapping[str, Flag], fragment: str, verb: str | None = None) -> list[str]:
    given = {BY_FLAG[word.text].flag if word.text in BY_FLAG else word.text for word in words}

    def fits(option: Option) -> bool:
        return option.flag not in given and (verb is None or VERBS[verb].has(option))

    flags = [option.flag for option in OPTIONS if fits(option)]
    flags += [flag for flag in own if flag not in given]
    if verb is not None and VERBS[verb].own:
        told = re.findall(r"--[a-z-]+", VERBS[verb].usage)
        flags += [flag for flag in told if flag not in given and flag not in BY_FLAG]
    if fragment == "-":
        flags += [option.short for option in OPTIONS if option.short and fits(option)]
    return flags


def _strategies(state: MagicsState) -> list[str]:
    from nbtrain.notebook.magics.own_strategies import of_notebook

    return ["auto", *registry.strategies(), *presets.names(), *of_notebook(state.notebook)]


def _own_flags(words: list[Word], state: MagicsState) -> dict[str, Flag]:
    name = state.defaults.value("strategy")
    for word, following in pairwise(words):
        if BY_FLAG.get(word.text) is BY_FLAG["--strategy"]:
            name = following.plain
    flags: dict[str, Flag] = {}
    preset = presets.find(name)
    for strategy in registry.AUTO if name == "auto" else (name if preset is None else preset.strategy,):
        if strategy in registry.strategies() and "torch" not in sys.modules:
            continue  # nobody waits seconds for a Tab
        try:
            flags.update(Chosen.named(strategy, state.notebook).flags())
        except Exception:  # half a line, or a strategy that cannot be loaded: running the cell will say why
            continue
    return flags


def _names(fragment: str, given: list[str], state: MagicsState, models: bool = False) -> tuple[str, list[str]]:
    """Names of the notebook except modules of Python, which are never sent; or those of `models` only, where torch is
    there to tell."""
    torch = sys.modules.get("torch")
    wanted: type = torch.nn.Module if models and torch is not None else object
    taken = {*given, *fragment.split(",")[:-1]}
    start = fragment[: fragment.rfind(",") + 1]
    hidden = getattr(state.shell, "user_ns_hidden", {})
    fits = [
        name
        for name, value in state.notebook.items()
        if not name.startswith("_")
        and name not in taken
        and name not in hidden
        and not isinstance(value, ModuleType)
        and isinstance(value, wanted)
    ]
    return fragment, [start + name for name in fits if (start + name).startswith(fragment)]


def _ranks(fragment: str, state: MagicsState) -> list[str]:
    head, comma, _ = fragment.rpartition(",")
    taken = head.split(",")
    return [f"{head}{comma}{rank}" for rank in range(state.world_size() or 0) if str(rank) not in taken]


def install(shell: InteractiveShell, state: MagicsState, names: Mapping[str, str]) -> Callable[[], None]:
    """Install the matcher; returns the function that removes it."""
    try:
        from IPython.core.completer import context_matcher
    except ImportError:
        return _install_before_8_6(shell, state, names)
    from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult

    # typed in some versions of IPython
    @context_matcher(identifier="nbtrain.notebook.magics")  # type: ignore[untyped-decorator, unused-ignore]
    def matcher(context: CompletionContext) -> SimpleMatcherResult:
        above = context.full_text.split("\n")[: context.cursor_line]
        left = context.text_until_cursor
        inside = left.lstrip().startswith("%%") and any(line.strip() for line in above)
        fragment, matches = NOTHING if inside else complete(left, state, names)
        return SimpleMatcherResult(
            completions=[SimpleCompletion(text=match, type="param") for match in matches],
            matched_fragment=fragment if matches else context.token,
            suppress=bool(matches),
            do_not_suppress=set(),
            ordered=False,
        )

    shell.Completer.custom_matchers.append(matcher)
    return lambda: shell.Completer.custom_matchers.remove(matcher)


def _install_before_8_6(shell: InteractiveShell, state: MagicsState, names: Mapping[str, str]) -> Callable[[], None]:
    """Install a matcher for the arguments of magics: only its matches are offered. Those of a completer hook are mixed
    with jedi's, for which `--st` is the beginning of some function of the notebook."""
    completer = shell.Completer

    def matcher(line: str) -> list[str]:
        fragment, matches = complete(completer.text_until_cursor, state, names)
        # IPython replaces its own idea of the last word, which begins behind any = or comma.
        word = completer.splitter.split_line(line, len(completer.text_until_cursor))
        known = len(fragment) - len(word)
        return [match[known:] for match in matches] if known >= 0 and fragment.endswith(word) else []

    completer.magic_arg_matchers.append(matcher)
    return lambda: completer.magic_arg_matchers.remove(matcher)
