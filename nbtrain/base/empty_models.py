"""`nbtrain.empty()`: models that are made without memory for their weights, because they would not fit.

    with nbtrain.empty():
        model = Big()                       # nothing but shapes

    model = nbtrain.empty(make_model, config)      # the same

    @nbtrain.empty()
    def configure_model(): ...                     # whenever it is called

What is left out is what `torch.empty` would have returned: it lies on torch's device "meta". All layers of torch make
their weights so, and fill them in `reset_parameters`; the ranks call that, one module at a time, and keep what they
need. Whatever an `__init__` computes (a table of positions, `torch.ones` for a norm) is there, and travels.

(The file is not called `empty`, or importing it would hide the function of that name.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any, TypeVar, overload

T = TypeVar("T")

NOTE = "_nbtrain_empty"
"""Attribute of a module: the seed of its weights, and the names of those that were made for it. The seed is drawn as
the weights would be, so that it depends on `torch.manual_seed` and two models differ; a copy of the module has it too,
as it would have the same weights. A weight that is tied later goes on being what it was made for."""


class Empty(ContextDecorator):
    """Inside, new weights take no memory."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        from torch.nn.modules.module import register_module_parameter_registration_hook

        mode = _mode()
        mode.__enter__()
        self._open.append((mode, register_module_parameter_registration_hook(_Notes())))

    def __exit__(self, *error: Any) -> None:
        mode, hook = self._open.pop()
        hook.remove()
        mode.__exit__(*error)


@overload
def empty() -> Empty: ...
@overload
def empty(make: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...
def empty(make: Callable[..., T] | None = None, /, *args: Any, **kwargs: Any) -> T | Empty:
    """Make a model without memory for its weights: `with nbtrain.empty(): model = Big()`, or
    `model = nbtrain.empty(Big, *arguments)`. The ranks fill in what each of them needs."""
    if make is None:
        return Empty()
    with Empty():
        return make(*args, **kwargs)


def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    makers = {torch.empty, torch.empty_strided, torch.empty_permuted}

    class WithoutMemory(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in makers and "out" not in kwargs:
                made = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
                if made.numel():  # a lazy layer's are empty until its first batch, and have the right device
                    return made
            return func(*args, **kwargs)

    return WithoutMemory()


class _Notes:
    """Called for every parameter that a module is given: notes those without memory."""

    def __init__(self) -> None:
        self._given: dict[int, Any] = {}

    def __call__(self, module: Any, name: str, parameter: Any) -> None:
        import torch

        if parameter is None or parameter.device.type != "meta":
            return
        note = vars(module).get(NOTE) or (int(torch.randint(2**62, (), device="cpu")),)
        names = [other for other in note[1:] if other != name]
        if id(parameter) not in self._given:
            self._given[id(parameter)] = parameter  # kept alive, so that no other object gets its id
            names.append(name)
        vars(module)[NOTE] = (note[0], *names)
