"""`--loss criterion`: the model's output waits until the criterion is called with it and the targets; then forwards and
backwards of the micro-batches take turns (1F1B), so that a stage keeps the activations of a few micro-batches only.

The gradients are there before `loss.backward()` is called: they are put aside until then, and count what the loss does.
What else is done with the output has it computed as it is otherwise.

What each micro-batch counts in a criterion's mean over the batch: most of torch's criteria count samples. Those of
classes leave out what `ignore_index` names, and weigh by class, so that micro-batches of one size count differently. Of
a user's own nobody knows: it is compared with the whole batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nbtrain.compat import pytree, tensors
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.strategies.pipeline.autograd_calls import AGAIN
from nbtrain.strategies.pipeline.micro_batches import BatchCut, join, shares
from nbtrain.strategies.pipeline.run_micro_batches import MicroBatchFlow, call
from nbtrain.strategies.pipeline.stage import KeptGraph

SUMMED = (
    "--loss: under pipeline the criterion is called for each micro-batch, and what it returns is averaged: it is to "
    "return the mean over a batch, as one number, and not {what}. Leave --loss out, or use reduction='mean'"
)


NEVER = (
    "what the model returned went to the criterion that --loss names, piece by piece, and no rank has all of it. Leave "
    "--loss out, or use it otherwise in the cell, and it is computed"
)


def _itself(found: Any) -> Any:
    return found


class PendingOutput(torch.Tensor):
    """What a model returns before it is computed: whatever is asked of it computes it, but for the criterion."""

    flow: MicroBatchFlow
    loss: NamedCriterion
    found: Any

    @classmethod
    def of(cls, flow: MicroBatchFlow, loss: NamedCriterion) -> PendingOutput:
        waiting: PendingOutput = tensors.as_subclass_of(cls, torch.empty(0))
        waiting.flow, waiting.loss, waiting.found = flow, loss, None
        return waiting

    def __iter__(self) -> Iterator[Any]:
        return iter(self.computed())

    def __getitem__(self, key: Any) -> Any:
        return self.computed()[key]

    def __reduce_ex__(self, version: Any) -> Any:
        """One rank packs what comes home: it cannot be computed any more."""
        if self.found is None:
            raise NotSupported(NEVER)
        return _itself, (self.found,)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        if self.found is None and not self.loss.on:
            return f"<what {self.flow.name} returned, in pieces>"
        return repr(self.computed())

    def computed(self) -> Any:
        if self.found is None:
            if not self.loss.on:  # the cell is over: one rank would compute alone
                raise NotSupported(NEVER)
            with self.flow.autocast_of_call():
                self.found = pytree.tree_map_only(torch.Tensor, _raised, call(self.flow))
        return self.found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = args[0] if args else None
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked == "dtype":
            return torch.float32  # it is asked by what `--precision` does around models, and is not to be computed yet
        if asked == "device" and isinstance(waiting, PendingOutput):
            return waiting.flow.place.device
        if isinstance(waiting, PendingOutput) and func is waiting.loss.function and waiting.found is None:
            return waiting.loss.of(waiting, func, args[1:], kwargs or {})
        with tensors.as_plain_tensors():
            args, kwargs = pytree.tree_map_only(PendingOutput, lambda one: one.computed(), (args, kwargs or {}))
        return func(*args, **kwargs)


class NamedCriterion:
    """The criterion that `--loss` names, while cells run."""

    def __init__(self, named: str, function: Any, parameters: Callable[[], Iterable[Any]]) -> None:
        """`named`: the class of the criterion, if it is a module; `function`: one of torch's."""
        self.named, self.function, self.parameters = named, function, parameters
        self.on = False
        """a cell runs"""
        self.most = 0
        """micro-batches whose activations were held at a time, in the last call"""

    def enter(self) -> None:
        self.leave()
        _while.on(self)
        self.on = True

    def leave(self) -> None:
        self.on = False
        _while.off(self)

    def of(
        self, waiting: PendingOutput, criterion: Callable[..., Any], targets: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        reduction = kwargs.get("reduction", getattr(criterion, "reduction", "mean"))
        if reduction != "mean":
            raise NotSupported(SUMMED.format(what=f"reduction={reduction!r}"))
        names = list(kwargs)

        def called(output: Any, *given: Any) -> Any:
            count = len(given) - len(names)
            return criterion(output, *given[:count], **dict(zip(names, given[count:], strict=True)))

        turns = OneForwardOneBackward(waiting.flow, called, [*targets, *kwargs.values()], self.parameters())
        turns.weights = weights(criterion, targets, kwargs, waiting.flow.cut)
        turns.check = not counts_alike(criterion)
        found: torch.Tensor = LossFunction.apply(turns, torch.zeros((), requires_grad=True))
        self.most = turns.most
        return found


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.nn.Module.__call__", "criterion", _called)


_while: While[NamedCriterion] = While(_put)


def _called(old: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        # The output says to which component it belongs, and so what its criterion is.
        if type(first) is PendingOutput and first.found is None and type(module).__name__ == first.loss.named:
            return first.loss.of(first, module, args[1:], kwargs)
        return old(module, *args, **kwargs)

    return call


class OneForwardOneBackward:
    """Runs one call's micro-batches in the order 1F1B."""

    def __init__(
        self, flow: MicroBatchFlow, criterion: Callable[..., Any], targets: list[Any], parameters: Iterable[Any]
    ) -> None:
        self.flow, self.criterion = flow, criterion
        self.whole = targets
        columns = [flow.cut.apply(target) for target in targets]
        self.targets = [[column[i] for column in columns] for i in range(len(flow.slices))]
        self.parameters = [p for p in parameters if p.requires_grad]
        self.losses: list[torch.Tensor] = []
        self.grads: list[torch.Tensor | None] = []
        self.most = 0
        """micro-batches whose activations were held at a time"""
        self.weights: list[float] = []
        """what each micro-batch counts"""
        self.check = False
        """whether the criterion is a mean over samples is not known beforehand"""
        self.outputs: list[Any] = []

    def run(self) -> torch.Tensor:
        """The loss, on every rank; the gradients are put aside."""
        flow, place = self.flow, self.flow.place
        flow.prepare(True)
        with tensors.as_plain_tensors():
            before = [p.grad for p in self.parameters]
            for p in self.parameters:
                p.grad = None
        try:
            self._turns()
            with tensors.as_plain_tensors():
                self.grads = [p.grad for p in self.parameters]
        finally:
            with tensors.as_plain_tensors():
                for p, grad in zip(self.parameters, before, strict=True):
                    p.grad = grad
        said: Any = place.failures.found
        if place.rank == place.last and said is None:
            try:
                said = torch.stack(self.losses).sum()
                if self.check:
                    self._compare(said)
            except Exception as error:  # the criterion's, too: the others wait for what is shared
                said = place.failures.take(error)
        found: torch.Tensor = flow.agreed(place.channel.share(said, place.last))
        return found

    @torch.no_grad()
    def _compare(self, loss: torch.Tensor) -> None:
        """With what the criterion says of the whole batch."""
        outputs, self.outputs = self.outputs, []
        whole = join(outputs, self.flow.cut, self.flow.name).output
        wanted = self.criterion(whole, *self.whole)
        if not torch.allclose(loss, wanted.to(loss.dtype), rtol=1e-3, atol=1e-5, equal_nan=True):
            raise NotSupported(NOT_A_MEAN.format(whole=float(wanted), parts=float(loss)))

    def _turns(self) -> None:
        flow, place = self.flow, self.flow.place
        count = len(flow.slices)
        held: list[tuple[int, KeptGraph]] = []
        following = 0
        for _ in range(min(place.last - place.rank, count)):
            held.append((following, self._forward(following)))
            following += 1
        self.most = len(held)
        while following < count or held:
            if following < count:
                held.append((following, self._forward(following)))
                following += 1
            self.most = max(self.most, len(held))
            number, stretch = held.pop(0)
            grads: list[Any] | None = [torch.ones(())] if place.rank == place.last else None
            flow.stages[number].backward(stretch, grads, False)
            stretch.ends = []
        place.channel.settle()

    def _forward(self, number: int) -> KeptGraph:
        flow, place = self.flow, self.flow.place
        with flow.autocast_of_call():
            stretch, result = flow.stages[number].forward(flow.slices[number])
        if place.rank == place.last and place.failures.found is None:
            try:
                with place.computing(True):
                    stretch.ends = [self._judged(number, result)]
                self.losses.append(stretch.ends[0].detach())
            except Exception as error:  # the other stages wait for its gradients
                place.failures.take(error)
        return stretch

    def _judged(self, number: int, result: Any) -> torch.Tensor:
        """What the criterion says of this micro-batch's output, by what it counts."""
        output = pytree.tree_map_only(torch.Tensor, _raised, result)
        loss = self.criterion(output, *self.targets[number])
        if self.check:
            self.outputs.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise NotSupported(SUMMED.format(what=what))
        if not self.weights[number]:  # all of it is left out: the mean of nothing is not a number
            loss = sum(leaf.sum() * 0 for leaf in pytree.tree_leaves(output))
        weighted: torch.Tensor = loss * self.weights[number]
        return weighted


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    """As `--precision` has a model return it."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class LossFunction(torch.autograd.Function):
    """The loss, whose backward gives the gradients that there are already."""

    @staticmethod
    def forward(ctx: Any, turns: OneForwardOneBackward, anchor: torch.Tensor) -> Any:
        ctx.turns = turns
        ctx.save_for_backward(anchor)
        return turns.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotSupported(AGAIN)
        _ = ctx.saved_tensors
        turns = ctx.turns
        turns.flow.place.meet(turns.flow.name)
        with tensors.as_plain_tensors():
            for p, found in zip(turns.parameters, turns.grads, strict=True):
                if found is not None:
                    found = found * grad.to(found.device, found.dtype)
                    p.grad = found if p.grad is None else p.grad + found
        turns.grads = [None] * len(turns.parameters)
        return None, None


NOT_A_MEAN = (
    "--loss: the criterion gives {whole:.6g} for the batch, and for its micro-batches {parts:.6g} on average, so that "
    "under pipeline it is no mean over samples (does it leave some out?). Leave --loss out, or use --strategy ddp"
)
BY_CLASS = nn.CrossEntropyLoss, nn.NLLLoss
BY_CLASS_TOO = F.cross_entropy, F.nll_loss


def counts_alike(criterion: Any) -> bool:
    """It is torch's own, whose means are known."""
    kind = criterion if not isinstance(criterion, nn.Module) else type(criterion)
    return str(getattr(kind, "__module__", "")).startswith("torch.")


def weights(
    criterion: Callable[..., Any], targets: Sequence[Any], kwargs: dict[str, Any], cut: BatchCut
) -> list[float]:
    """For each micro-batch, one in all."""
    y = targets[0] if targets else kwargs.get("target", kwargs.get("input"))
    by_class = isinstance(criterion, BY_CLASS) or criterion in BY_CLASS_TOO
    if not by_class or not isinstance(y, torch.Tensor) or y.is_floating_point() or y.shape[:1] != (cut.batch,):
        return shares(cut)
    weight = kwargs.get("weight", targets[1] if len(targets) > 1 else getattr(criterion, "weight", None))
    counts = y != kwargs.get("ignore_index", getattr(criterion, "ignore_index", -100))
    each = counts.double()
    if isinstance(weight, torch.Tensor):
        each = each * weight.double()[y.clamp(min=0) * counts]
    sums = torch.stack([part.sum() for part in each.split(cut.sizes)])
    return (sums / sums.sum()).tolist() if sums.sum() else shares(cut)
