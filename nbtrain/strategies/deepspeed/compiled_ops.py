"""DeepSpeed's compiled ops. Compiling one takes a minute, during which DeepSpeed says nothing, and every rank would
begin it: here it is loaded where it was compiled before, and else the line that compiles it is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.compat.extensions import compiled
from nbtrain.strategies.deepspeed.quiet import quiet

MISSING = (
    "DeepSpeed's {name} is not compiled on this machine. Compile it once, with a C++ compiler and ninja (apt install "
    "g++; pip install ninja{more}), in a terminal or behind ! in a cell: {line}. Or install DeepSpeed with it: "
    "{build}=1 pip install --force-reinstall --no-deps --no-build-isolation deepspeed"
)
FROM = "from deepspeed.ops.op_builder import {builder} as op; op().load()"


def load(deepspeed: Any, builder: str) -> Any:
    """The op."""
    make: Any = deepspeed.accelerator.get_accelerator().create_op_builder(builder)
    if make is None:
        raise UsageError(f"DeepSpeed has no {builder.removesuffix('Builder')} for this kind of device")
    try:
        with quiet():
            return make.load(verbose=False)
    except UsageError:  # it, or another one that comes with it
        raise UsageError(missing(make)) from None


def not_compiled_here(old: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of DeepSpeed's own compiling of an op that was not installed with it."""

    def jit_load(make: Any, verbose: bool = True) -> Any:
        try:
            op = compiled(make.name)
        except ImportError as error:  # of another version of torch
            raise UsageError(f"{missing(make)} ({error})") from error
        if op is None:
            raise UsageError(missing(make))
        return op

    return jit_load


def missing(make: Any) -> str:
    line = f'{sys.executable} -c "{FROM.format(builder=type(make).__name__)}"'
    more = "; apt install libaio-dev" if make.name == "async_io" else ""
    return MISSING.format(name=make.name, build=make.BUILD_VAR, line=line, more=more)
