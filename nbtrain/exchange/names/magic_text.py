"""Finds the Python code inside a magic: IPython makes a string of it, and runs the string in the notebook.

`%time f(x)` arrives as `get_ipython().run_line_magic('time', 'f(x)')`. Of `!cmd` and of most magics only `$name` and
`{expression}` are code; taking every word would ship the data set for `!ls data`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

# the magics whose text is Python, with the letters of their options that take a value
CODE = {
    "time": "",
    "timeit": "nrpv",
    "prun": "lsTD",
    "memit": "rti",
    "mprun": "fT",
    "lprun": "fmDTu",
    "debug": "b",
    "capture": "",
}
ISOLATED = {"timeit"}  # runs its code in a function: nothing is bound
NAMES_A_FUNCTION = {"lprun", "mprun"}  # their -f is looked up in the notebook

# magics that neither run Python nor bind names; after any other one, names cannot be judged
INERT = frozenset(
    """
    alias autoreload bash cat cd colors conda config cp dirs env file hist history html javascript js latex
    ldir less ll load_ext logstart logstop ls lsmagic magic mamba man markdown matplotlib micromamba mkdir
    more mv notebook page pastebin pdb pdoc perl pfile pinfo pinfo2 pip popd precision psearch psource pushd
    pwd pycat quickref reload_ext rm rmdir ruby save script set_env sh svg sx system tb tensorboard unload_ext
    uv who who_ls whos writefile xmode
    """.split()  # noqa: SIM905  # a list of so many words is hard to read
)
SHELL_CALLS = {"system", "getoutput"}
MAGIC_CALLS = {"run_line_magic", "run_cell_magic"}

_OPTION = re.compile(r"\s*(--\S+|-[A-Za-z]+)\s*")
_VALUE = re.compile(r"\s*(\S+)\s*")
_DOLLAR = re.compile(r"(?<!\$)\$([A-Za-z_]\w*)")
_BRACES = re.compile(r"(?<!\{)\{([^{}]+)\}")
_STORED = re.compile(r"--(?:out|err|proc)[ =]+([A-Za-z_]\w*)")
_MAGIC_LINE = re.compile(r"(\s*(?:[A-Za-z_][\w.,\s]*=\s*)?)([%!])(?!=)(.*)")


@dataclass(slots=True)
class Magic:
    """What one magic call contains. Lines count from the line of the call."""

    code: list[tuple[str, int]] = field(default_factory=list)
    """Python sources, in the order they run, each with its first line"""
    expressions: list[str] = field(default_factory=list)
    """what `$name` and `{expression}` would look up; skipped by IPython where it cannot be evaluated"""
    binds: set[str] = field(default_factory=set)
    isolated: bool = False
    opaque: bool = False


def read(call: ast.Call) -> Magic | None:
    """What a call of a magic or a shell command contains; None for every other call."""
    method = call.func
    if not isinstance(method, ast.Attribute) or not _is_shell(method.value):
        return None
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if len(texts) != len(call.args) or not texts or method.attr not in SHELL_CALLS | MAGIC_CALLS:
        return Magic(opaque=True)  # get_ipython() used by hand: it can do anything
    if method.attr in SHELL_CALLS:
        return Magic(expressions=_expanded(texts[0]))
    name, line, *body = [*texts, ""] if len(texts) == 1 else texts
    if name in CODE:
        return _code_magic(name, line, body)
    return Magic(expressions=_expanded(line), binds=set(_STORED.findall(line)), opaque=name not in INERT)


def _code_magic(name: str, line: str, body: list[str]) -> Magic:
    magic = Magic(isolated=name in ISOLATED)
    if name == "capture":
        magic.binds.update([word for word in line.split() if not word.startswith("-")][:1])
        line = ""
    line = _without_options(name, line, magic)
    if line.strip():
        magic.code.append((line, 0))
    magic.code.extend((text, 1) for text in body)
    return magic


def _without_options(name: str, line: str, magic: Magic) -> str:
    while option := _OPTION.match(line):
        line = line[option.end() :]
        # -n10 carries its value, -n 10 is followed by it
        if option[1][-1] in CODE[name] and not option[1].startswith("--") and (value := _VALUE.match(line)):
            line = line[value.end() :]
            if name in NAMES_A_FUNCTION:
                magic.expressions.append(value[1])
        else:
            line = re.sub(r"^\d+\s+", "", line)
    return line


def _expanded(text: str) -> list[str]:
    return _DOLLAR.findall(text) + [expression.strip() for expression in _BRACES.findall(text)]


def _is_shell(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_ipython"


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a magic's body, which may hold magics again; None when it is no Python even so."""
    try:
        return ast.parse(text)
    except SyntaxError:
        pass
    if text.lstrip().startswith("%%"):
        head, _, rest = text.lstrip()[2:].partition("\n")
        name, _, line = head.partition(" ")
        lines = [f"get_ipython().run_cell_magic({name!r}, {line!r}, {rest!r})"]
    else:
        lines = [_MAGIC_LINE.sub(_call, line, count=1) for line in text.split("\n")]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None


def _call(match: re.Match[str]) -> str:
    before, sign, rest = match.groups()
    if sign == "!":
        return f"{before}get_ipython().{'getoutput' if '=' in before else 'system'}({rest!r})"
    name, _, line = rest.partition(" ")
    return f"{before}get_ipython().run_line_magic({name!r}, {line!r})"
