"""What becomes of a call of a model while a cell runs: it goes through the engine, is a plain one, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import deepspeed as ds
from nbtrain.compat.autograd_engine import in_backward
from nbtrain.compat.compiler import outside_graphs
from nbtrain.compat.pytree import tree_map
from nbtrain.strategies.deepspeed.engine_parts import EngineParts
from nbtrain.strategies.deepspeed.parameter_access import FOLLOWED, LATE, ParameterAccess
from nbtrain.strategies.kit import functional_transforms
from nbtrain.strategies.kit.call_router import call_plainly, route, unroute


class EngineCalls:
    """Sends calls of a component's models through its engine; `enter` and `leave` with each cell."""

    def __init__(self, parts: EngineParts, reader: ParameterAccess, outputs: WeakValueDictionary[int, Any]) -> None:
        """`outputs`: of models, on which DeepSpeed has put something that is not the notebook's."""
        self.parts, self.reader = parts, reader
        self._outputs = outputs

    def enter(self) -> None:
        for module in self.parts.component.modules.values():
            route(module, self._outside if self.parts.stage == 3 else self._through, self._apart)

    @property
    def busy(self) -> bool:
        """A forward or a backward is under way."""
        return self.parts.inside or in_backward()

    def leave(self, pause: bool) -> None:
        """`pause`: outputs wait for their backward."""
        for module in self.parts.component.modules.values():
            unroute(module)
        if pause:
            return
        self.parts.inside = False
        for out in self._outputs.values():
            ds.unmark(out)
        self._outputs.clear()

    @outside_graphs  # stage 3 gathers weights in its hooks, and the compiler can follow neither
    def _outside(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        return self._through(module, name, args, kwargs)

    def _through(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        if self.parts.weights.shown_copies:  # what the loop has written to a state dict
            self.parts.weights.take_shown()
        parts = self.parts
        if parts.inside or not parts.entered:
            return call_plainly(module, name, args, kwargs)
        if in_backward():
            if any(module is model for model in parts.models):
                raise NotSupported(
                    f"{type(module).__name__} as a whole is recomputed in the backward, and DeepSpeed's engine has to "
                    "see its forward: checkpoint its blocks instead of all of it, or take the strategy ddp"
                )
            return call_plainly(module, name, args, kwargs)
        if parts.stage == 3:
            functional_transforms.refuse_call(type(module).__name__, "under deepspeed stage 3")
        parts.inside = True
        parts.core.target = module
        try:
            with self.reader.in_model(is_forward=name in ("__call__", "forward")):
                (out,) = parts.engine(name, args, kwargs)
                if isinstance(out, dict):
                    _in_step(out)
                    for value in out.values():
                        self._note_output(value)
                tree_map(self._note_output, out)
                return out
        except AttributeError as error:
            parts.tell_of_layers(error)
            raise
        except RuntimeError as error:  # what is not gathered is one number in memory
            if "single memory location" in str(error) and parts.stage == 3 and self.reader.forwards > FOLLOWED:
                raise NotSupported(LATE) from error
            raise
        finally:
            parts.inside = False
            parts.core.target = None

    def _note_output(self, out: Any) -> None:
        if ds.is_marked(out):
            self._outputs[id(out)] = out

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """While a model is copied (an average of its weights is kept so): the copy is to be a plain one."""
        parts = self.parts
        if parts.stage == 3:
            raise NotSupported(
                "a copy of the model inside of the cell would have no weights: under stage 3 they are in pieces. Write "
                "`with whole(model): ema = copy.deepcopy(model)`, or keep copy.deepcopy(model.state_dict())"
            )
        if not parts.attachments.attached:  # a part of the model that a cell has given to an optimizer by itself
            yield
            return
        grads = [p.grad for p in parts.trained]
        parts.attachments.off()
        try:
            yield
        finally:
            parts.attachments.on()
            for p, grad in zip(parts.trained, grads, strict=True):
                p.grad = grad

    def check_part(self, module: nn.Module, args: Any) -> None:
        """A hook of each part of a model."""
        if self.parts.inside or not self.parts.entered or not torch.is_grad_enabled() or in_backward():
            return
        raise NotSupported(
            f"{type(module).__name__} is a part of a model and was called directly, past DeepSpeed's engine, which "
            "would not see its gradients: write `with whole(model): …` around a line that only reads what it gives (a "
            "parametrized weight, features); to train through it, put the call into a method of the model"
        )


def _in_step(out: dict[Any, Any]) -> None:
    """A dict that has its items as attributes, too, as Hugging Face's outputs do: DeepSpeed has put others in the place
    of the items, by which it finds where a backward begins."""
    own = getattr(out, "__dict__", {})
    own.update({key: value for key, value in out.items() if key in own and isinstance(value, torch.Tensor)})
