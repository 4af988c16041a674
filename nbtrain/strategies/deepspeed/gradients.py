"""Between `loss.backward()` and `optimizer.step()`: the plain loop's calls become the engine's.

The engine holds the gradients. Each parameter's `grad` is a stand-in (see stand_ins.py), so that code which
looks at gradients or changes them by hand is noticed, and so that setting them to None, however that is done, is what
it means: the engine's are thrown away, too. It stays there after the step, as in one process a gradient would.

The user's optimizer is in inner_optimizer.py, what DeepSpeed keeps of gradients in engine_layout.py, what users read in
error_texts.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter, eq
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import deepspeed as ds
from nbtrain.errors import NbtrainError, NotSupported
from nbtrain.strategies.deepspeed import error_texts
from nbtrain.strategies.deepspeed.engine_parts import EngineParts
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer, OptimizerHandle
from nbtrain.strategies.deepspeed.parameter_access import ParameterAccess
from nbtrain.strategies.deepspeed.stand_ins import MOVED, HeldGradient

TRAINABLE = attrgetter("requires_grad")


class EngineGradients:
    """Follows backwards, steps and clipping of one engine. Made when the engine is; `enter` and `leave` with each cell,
    `pause` and `enter` in the middle of one."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.engine = engine = parts.engine
        self.zero = engine.optimizer
        self.layout, self.weights = parts.layout, parts.weights
        self.stage = parts.stage
        self.trained = parts.trained
        self.user = parts.user
        self.handle = OptimizerHandle(parts.user, self)
        self.skipped = 0
        self.held = False
        """some backward has left gradients with the engine"""
        self.taken = True
        """the stand-ins are off"""
        self.opened = self.ended = False
        self.came = False
        """the backward under way has left a gradient in a parameter"""
        self.local: dict[int, torch.Tensor] = {}
        """stage 1 keeps this rank's own gradients, where the stand-ins are now"""
        self.arrived: set[int] = set()
        self.stepped = False
        """there are gradients that a step has used up, whether others were added to them or not"""
        self.reduced = False
        """stage 1: they are, before the step"""
        self.norm = 0.0
        self.max_norm = 0.0
        """of a clip, until the step"""
        self.clipping = float(self.zero.clip_grad)
        self.stand_ins = [HeldGradient.of(p, _dtype(parts, p)) for p in self.trained]
        self.paused: list[torch.Tensor | None] | None = None
        """what each parameter's grad was, in a pause"""
        self.scaled = parts.precision.startswith("16")
        self._warned = False
        self.reader = ParameterAccess(self.weights, parts.parameters if self.stage == 3 else (), self.open_for_penalty)
        self._listen()

    @property
    def entered(self) -> bool:
        return self.parts.entered

    # -- the engine's own hooks ----------------------------------------------------------

    def _listen(self) -> None:
        engine, zero = self.engine, self.zero

        def opening(first: Callable[[], None]) -> Callable[[], None]:
            def prologue() -> None:
                if self.opened and ds.in_backward(zero):  # several forwards in one backward open it once
                    return
                self.take_back()
                self.came = False
                if self.ended:  # another backward without a forward in between
                    zero.clear_backward_seen_flag()
                self.opened, self.ended = True, False
                if self.scaled:
                    ds.expect_scaled(engine)
                first()
                ds.has_begun_once(zero)

            return prologue

        self.open = prologue = ds.around_beginning(engine, opening)
        zero.unregister_grad_acc_post_hooks()
        zero.register_grad_acc_post_hook(self._after_backward)  # which calls the engine's
        if self.scaled:
            zero.torch_autocast_gradscaler = None
            zero.override_loss_scale(self.parts.loss_scale.value)
        name = "reduce_ready_partitions_and_remove_grads" if self.stage == 3 else "process_gradients"
        plain: Callable[..., Any] = getattr(zero, name)
        arrived = self.arrived

        def noted(p: torch.Tensor, *args: Any) -> Any:
            if not self.opened:  # by a way on which no output of a new forward lay
                if self.stage == 3 and not self.parts.inside:  # inside: by a method that trains
                    raise NotSupported(error_texts.SPENT)
                prologue()
            arrived.add(id(p))
            self.came = True
            return plain(p, *args)

        setattr(zero, name, noted)

    def open_for_penalty(self) -> None:
        """A gradient comes by way of a weight that was read outside of the model's forward."""
        if not self.opened:
            self.open()

    def _after_backward(self) -> None:
        self.opened, self.ended = False, True
        if not self.came:  # gradients of inputs alone (torch.autograd.grad): nothing to reduce
            self.zero.exit_backward()
            if self.held or self.stepped:
                self._stand_in()
            return
        ds.end_backward(self.engine)
        self.held = True
        self.parts.loss_scale.holding.add(id(self))
        self._stand_in()

    def _stand_in(self) -> None:
        for p, stand_in in zip(self.trained, self.stand_ins, strict=True):
            if p.grad is not None and p.grad is not stand_in:
                self.local[id(p)] = p.grad
            p.grad = stand_in
            stand_in.zeroed = False
        self.taken = False

    def take_back(self) -> None:
        """Take the stand-ins off, and follow what the cell has done to them."""
        if self.taken:
            return
        self.taken = True
        kept = emptied = 0
        for p, stand_in in zip(self.trained, self.stand_ins, strict=True):
            if p.grad is stand_in and stand_in.zeroed:
                emptied += 1
                p.grad = None
            elif p.grad is stand_in:
                kept += 1
                p.grad = self.local.pop(id(p), None)
            elif p.grad is None:
                emptied += 1
            else:
                p.grad = None
                raise NotSupported(error_texts.BY_HAND)
        if emptied and kept:
            raise NotSupported(error_texts.SOME_SET_TO_NONE)
        if emptied:
            self.discard()

    # -- what the loop calls -------------------------------------------------------------

    def enter(self) -> None:
        self.weights.remember(self.trained)
        if self.paused is None:
            self.handle.put_on()
            return
        for p, grad in zip(self.trained, self.paused, strict=True):
            p.grad = grad
        self.paused = None

    def pause(self) -> None:
        """The optimizer stays the engine's handle: what the cell has put around its `step` since is not to be lost."""
        self.paused = [p.grad for p in self.trained]
        for p in self.trained:  # in the notebook's form they have another dtype
            p.grad = None

    def used_up(self) -> set[int]:
        """In a pause: the parameters whose gradients a step has used up, and nobody has thrown away."""
        pairs = zip(self.trained, self.paused or (), strict=False)
        return {id(p) for p, grad in pairs if self.stepped and grad is not None and not getattr(grad, "zeroed", False)}

    def go_on(self, used: set[int]) -> None:
        """In a pause, after the engine was made anew: a step of the one before has used up the gradients of these."""
        self.handle.put_on()
        self.stepped = bool(used)
        self.taken = not used
        self.paused = [one if id(p) in used else None for p, one in zip(self.trained, self.stand_ins, strict=True)]

    def leave(self) -> None:
        self.paused = None
        self.handle.take_off()
        for p in self.trained:
            p.grad = None
        self.taken = True
        self.local.clear()
        self.discard()

    def step(self) -> None:
        with self.reader.suspended():
            self._step()

    def _step(self) -> None:
        parts, engine, zero = self.parts, self.engine, self.zero
        self._check_frozen()
        self.take_back()
        if self.stepped:  # and nobody has thrown them away since
            self.discard()
            raise NotSupported(error_texts.NOT_ZEROED)
        if not self.held:
            if any(p.grad is not None for p in self.trained):
                raise NotSupported(error_texts.BY_HAND)
            return  # no gradients: one process would leave everything as it is
        self._warn_of_missing()
        self.weights.follow_edits(self.trained)
        if isinstance(parts.inner, InnerOptimizer):
            parts.state.follow()
            parts.inner.take_options()
        zero.clip_grad = self.max_norm or self.clipping
        reduces, engine.enable_backward_allreduce = engine.enable_backward_allreduce, not self.reduced
        try:
            engine.step()
        except AttributeError as error:
            parts.tell_of_layers(error)
            raise
        finally:
            zero.clip_grad = self.clipping
            engine.enable_backward_allreduce = reduces
        overflow = bool(zero.overflow)
        self.skipped += overflow
        if overflow and not self.scaled and self.skipped == 1 and dist.get_rank() == 0:
            warnings.warn(error_texts.not_finite(self.stage), stacklevel=4)
        if self.scaled:
            parts.loss_scale.stepped(overflow)
        if engine.lr_scheduler is not None:
            self._show_rates()
        self._done()
        if isinstance(parts.inner, InnerOptimizer):
            parts.inner.give_options()
            parts.state.begin()
        self.stepped = True
        self._stand_in()

    def _show_rates(self) -> None:
        """Learning rates that a scheduler of the config's has moved are shown in the user's groups, and come home."""
        for group, number in zip(self.zero.param_groups, self.parts.sources, strict=True):
            shown = self.user.param_groups[number]
            shown.update({name: group[name] for name in ("lr", "betas", "momentum") if name in group and name in shown})

    def _done(self) -> None:
        dirty = self.held or bool(self.arrived)
        self.held = self.opened = self.ended = self.stepped = self.reduced = False
        self.max_norm = 0.0
        self.arrived.clear()
        self.local.clear()
        self.parts.loss_scale.holding.discard(id(self))
        if dirty:  # once a step is enough
            self.layout.wipe_gradients()
        self.weights.remember(self.trained)

    def _check_frozen(self) -> None:
        parts = self.parts
        if not all(map(eq, map(TRAINABLE, parts.parameters), parts.requires)):
            raise NotSupported(error_texts.THAWED)

    def _warn_of_missing(self) -> None:
        if self._warned or len(self.arrived) >= len(self.trained):
            return
        self._warned = True
        missing = [p for p in self.trained if id(p) not in self.arrived]
        names = [n for m in self.parts.models for n, p in m.named_parameters() if any(p is one for one in missing)]
        if dist.get_rank() == 0:
            warnings.warn(error_texts.without_gradient(names), stacklevel=5)

    # -- clipping, accumulating ----------------------------------------------------------

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """The norm is that of now; the clipping is the step's. Collective."""
        trainable = [id(p) for p in parameters if p.requires_grad]
        asked = set(trainable)
        mine = {id(p) for p in self.trained}
        if not asked & mine:
            return None
        if not mine <= asked or asked - mine - {id(p) for p in self.parts.component.parameters()}:
            raise NotSupported(error_texts.SOME_CLIPPED)
        if len(asked) < len(trainable):
            raise NotSupported(error_texts.CLIPPED_TWICE)
        if float(norm_type) != 2.0:
            raise NotSupported(error_texts.OTHER_NORM.format(norm_type=norm_type))
        if not self.held or all(p.grad is None or getattr(p.grad, "zeroed", False) for p in self.trained):  # nothing is
            return torch.zeros(())
        finite = math.isfinite(max_norm)
        norm = self._norm(finite) / float(self.zero.loss_scale)
        if self.max_norm:  # clipped before
            norm = norm.clamp(max=self.max_norm)
        if finite:
            self.norm = float(norm) if not self.max_norm else self.norm
            self.max_norm = min(float(max_norm), self.max_norm or math.inf)
        return norm

    @torch.no_grad()
    def _norm(self, to_step: bool) -> torch.Tensor:
        """`to_step`: it is the end of gathering gradients."""
        zero, engine = self.zero, self.engine
        if self.stage != 1:
            return self.layout.norm_of_reduced(self.parts.device, self.arrived)
        self.take_back()
        if not to_step and not self.reduced:
            mine = ((p, getattr(p, "grad_accum", None) if p.grad is None else p.grad) for p in self.trained)
            norm = self.layout.norm_of_own(torch.zeros_like(p) if g is None else g for p, g in mine)
        else:
            if not self.reduced:  # as the step would
                ds.gather_all(engine)
                self.reduced = True
            norm = zero.scaled_global_norm()
        self._stand_in()
        return norm

    def _clip_now(self) -> None:
        """More is to be added to what was clipped."""
        if self.reduced:
            raise NotSupported(error_texts.CLIPPED)
        if self.held and self.max_norm:
            self.multiply(min(1.0, self.max_norm / (self.norm + 1e-6)))
            self.max_norm = 0.0

    def multiply(self, factor: float) -> None:
        self.layout.multiply_gradients(self.trained, self.local.values(), factor)

    # -- throwing away -------------------------------------------------------------------

    def discard(self) -> None:
        """What the engine holds of gradients is thrown away."""
        self.layout.discard_gradients(self.trained)
        self._done()

    def reset(self) -> None:
        """A backward was cut short."""
        self.layout.forget_backward()
        for p in self.trained:
            p.grad = None
        self.taken = True
        self.opened = self.ended = False
        self.parts.inside = False
        self.discard()

    @contextmanager
    def backward(self) -> Iterator[float]:
        if any(map(TRAINABLE, self.parts.parameters)):  # else a loss of another model's: a GAN freezes one for it
            self._check_frozen()  # before anything is sent: all ranks say it
        self.take_back()
        self._clip_now()
        factor = 1.0
        if self.scaled:
            factor = self.parts.loss_scale.begin()
            self.zero.override_loss_scale(factor)  # what is held now was made with it, or will be
        try:
            with self.reader.suspended():
                yield factor
            if self.taken and (self.held or self.stepped):  # it went through other models only
                self._stand_in()
        except NbtrainError:
            raise
        except Exception as error:
            self.parts.tell_of_layers(error)
            moved = any(p.dtype != stand_in.dtype for p, stand_in in zip(self.trained, self.stand_ins, strict=True))
            sentence = MOVED if moved else error_texts.of_backward(error, self.stage)
            if sentence is None:
                raise
            raise NotSupported(sentence) from error

    def close(self) -> None:
        self.leave()
        self.zero.unregister_grad_acc_post_hooks()


def _dtype(parts: EngineParts, p: torch.Tensor) -> torch.dtype:
    """What the model computes with."""
    return p.dtype if p.dtype.is_floating_point else parts.shapes[id(p)][1]
