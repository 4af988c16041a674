"""`--engine inprocess`: the cell runs in the kernel, on the notebook's own objects."""

from __future__ import annotations

import ast
import inspect
import time
from contextlib import suppress
from types import FunctionType
from typing import Any

import nbtrain.machine.registry as registry
from nbtrain.base.errors import UsageError, text_of
from nbtrain.base.events import Event, Failed
from nbtrain.base.specs import PRECISIONS, RankInfo, RunSpec
from nbtrain.compat import intercept, kernel
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_path import find_all
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import learn_atoms
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.debugging.kernel_breakpoints import breakpoints
from nbtrain.notebook.output.screens import CellScreen
from nbtrain.notebook.run.observers import Observers


def run(shell: Any, spec: RunSpec, cell: Cell, names: Any) -> None:
    import torch

    strategy = registry.make_strategy(spec.strategy, spec.options, shell.user_ns)
    threads = torch.get_num_threads()
    pool = spec.pool
    info = RankInfo(
        rank=0, world_size=1, local_rank=0, device=pool.devices[0], threads=threads,
        devices=pool.devices if pool.together else (),
    )  # fmt: skip
    screen = CellScreen(shell)
    observers = Observers(shell, spec, cell, None, "", print, screen)
    precision = "" if spec.precision == PRECISIONS[0] else f" · {spec.precision}"
    summary = f"{spec.strategy} · in the kernel · {pool.where}{precision}"
    observers.opened(summary)
    screen.begin()  # what the cell prints does not come this way

    def emit(event: Event) -> None:
        observers.receive(event)
        observers.tick(time.monotonic())

    ok = False
    try:
        engine = registry.engine("inprocess").load()(info, strategy)
        for note in engine.run(spec, _objects(shell.user_ns, names), lambda: _debuggable(shell, cell), emit):
            print(note)
        ok = True
    except BaseException as error:
        name, stopped = type(error).__name__, isinstance(error, KeyboardInterrupt)
        emit(Failed(rank=0, time=time.time(), name=name, text=text_of(error), lines=(), interrupted=stopped))
        raise
    finally:
        _own_again(shell.user_ns)
        observers.closed(ok)


def _own_again(namespace: dict[str, Any]) -> None:
    """Give back torch's own functions for wrappers that the cell has imported by name."""
    for name, value in list(namespace.items()):
        if type(value) is FunctionType and (path := intercept.path_of(value)):
            namespace[name] = intercept.at(path)


def _objects(namespace: dict[str, Any], names: Any) -> dict[str, Any]:
    from nbtrain.worker.setup.components import PREPARABLE

    learn_atoms()
    walk = Walk(ObjectTable(0), namespace, keep_home=True)
    for name in (*names.hard, *names.soft):
        walk.name(name, namespace[name])
    return find_all(walk.table, {name: namespace[name] for name in (*names.hard, *names.soft)}, PREPARABLE)


def _debuggable(shell: Any, cell: Cell) -> None:
    with breakpoints(shell):
        _execute(shell, cell)


def _execute(shell: Any, cell: Cell) -> None:
    """Run the cell as the shell would, but raise to the magic: errors are shown once, breakpoints stop in the cell."""
    tree = shell.transform_ast(shell.compile.ast_parse(cell.code, cell.filename))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    compiled = compile(tree, cell.filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        raise UsageError("`await` at the top of a cell needs ranks of its own: leave --engine inprocess out")
    value = None
    try:
        exec(compiled, shell.user_ns)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), cell.filename, "eval"), shell.user_ns)
    except BaseException as error:
        _show_from_the_cell_on(shell, error)
        raise
    if value is not None and not cell.quiet:
        shell.display_pub.publish(*shell.display_formatter.format(value))


def _show_from_the_cell_on(shell: Any, error: BaseException) -> None:
    """Show the traceback without the magic's own frames."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = list(shell.InteractiveTB.structured_traceback(type(error), error, below))
    with suppress(AttributeError):  # a class with slots is shown whole
        kernel.show_as(error, lines)
