"""Between `loss.backward()` and `optimizer.step()`: the plain loop's calls become the engine's.

The engine holds the gradients. Each parameter's `grad` is a stand-in (see stand_ins.py), so that code which
looks at gradients or changes them by hand is noticed, and so that setting them to None, however that is done, is what
it means: the engine's are thrown away, too. It stays there after the step, as in one process a gradient would.

Their numbers are in held_gradients.py, the user's optimizer in inner_optimizer.py, what users read in error_texts.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NbtrainError, NotSupported
from nbtrain.compat import deepspeed as ds
from nbtrain.compat.intercept import original
from nbtrain.strategies.deepspeed import error_texts
from nbtrain.strategies.deepspeed.engine_parts import TRAINABLE, EngineParts
from nbtrain.strategies.deepspeed.held_gradients import HeldGradients
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer, OptimizerHandle
from nbtrain.strategies.deepspeed.parameter_access import ParameterAccess
from nbtrain.strategies.deepspeed.stand_ins import MOVED, HeldGradient
from nbtrain.strategies.kit.component_tensors import named_parameters
from nbtrain.strategies.kit.same_on_ranks import differing
from nbtrain.strategies.kit.written_numbers import FIRST, compare, found_gradients, wrote


class EngineGradients:
    """Follows backwards, steps and clipping of one engine. Made when the engine is; `enter` and `leave` with each cell,
    `pause` and `enter` in the middle of one."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.engine = engine = parts.engine
        self.zero = engine.optimizer
        self.weights = parts.weights
        self.held = HeldGradients(parts)
        self.stage = parts.stage
        self.trained = parts.trained
        self.user = parts.user
        self.handle = OptimizerHandle(parts.user, self)
        self.skipped = 0
        self.taken = True
        """the stand-ins are off"""
        self.opened = False
        self.came = False
        """the backward under way has left a gradient in a parameter"""
        self.graded: set[int] = set()
        """ids of parameters that have a gradient in one process: until it is set to None, also after a step. Others are
        left out of the step"""
        self._agreed: set[int] = set()
        """those without a gradient, as the ranks have last compared them"""
        self.stepped = False
        """there are gradients that a step has used up, whether others were added to them or not"""
        self.stand_ins = [  # as the model computes with it
            HeldGradient.made_once(p, p.dtype if p.dtype.is_floating_point else parts.shapes[id(p)][1])
            for p in self.trained
        ]
        self.paused: list[torch.Tensor | None] | None = None
        """what each parameter's grad was, in a pause"""
        self.scaled = parts.precision.startswith("16")
        self.reader = ParameterAccess(self.weights, parts.parameters if self.stage == 3 else (), self.open_for_penalty)
        self.count = 0
        """of steps in this cell"""
        self._listen()

    @property
    def entered(self) -> bool:
        return self.parts.entered

    @property
    def _leaves_some(self) -> bool:
        """There are gradients, once a backward is over: the engine's, those that were stepped, zeros."""
        return self.held.some or self.stepped or not self.graded <= self.held.arrived

    # -- the engine's own hooks ----------------------------------------------------------

    def _listen(self) -> None:
        engine, zero = self.engine, self.zero

        def opening(first: Callable[[], None]) -> Callable[[], None]:
            def prologue() -> None:
                if self.opened and ds.in_backward(zero):  # several forwards in one backward open it once
                    return
                self.take_back()
                self.came = False
                zero.clear_backward_seen_flag()  # as a forward does, which there need not be: of a penalty alone
                self.opened = True
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
        arrived = self.held.arrived

        def noted(p: torch.Tensor, *args: Any) -> Any:
            if not self.opened:  # by a way on which no output of a new forward lay
                if self.stage == 3 and not self.parts.inside:  # inside: by a method that trains
                    raise NotSupported(error_texts.SPENT)
                prologue()
            if p.grad is not None and p.grad.is_sparse:  # DeepSpeed copies dense ones into its buffers
                p.grad = p.grad.to_dense()
            arrived.add(id(p))
            self.graded.add(id(p))
            self.came = True
            return plain(p, *args)

        setattr(zero, name, noted)

    def open_for_penalty(self) -> None:
        """A gradient comes by way of a weight that was read outside of the model's forward."""
        if not self.opened:
            self.open()

    def _after_backward(self) -> None:
        self.opened = False
        if not self.came:  # gradients of inputs alone (torch.autograd.grad): nothing to reduce
            self.zero.exit_backward()
            if self._leaves_some:
                self._stand_in()
            return
        ds.end_backward(self.engine)
        self.held.some = True
        self.parts.loss_scale.holding.add(id(self))
        self._stand_in()

    def _stand_in(self) -> None:
        for p, stand_in in zip(self.trained, self.stand_ins, strict=True):
            if p.grad is not None and p.grad is not stand_in:
                self.held.local[id(p)] = p.grad
            p.grad = stand_in if id(p) in self.graded else None
            stand_in.zeroed = False
        self.taken = False

    def take_back(self) -> None:
        """Take the stand-ins off, and follow what the cell has done to them."""
        if self.taken:
            return
        self.taken = True
        lost, zeroed, made = [], set(), []
        for p, stand_in in zip(self.trained, self.stand_ins, strict=True):
            grad = p.grad
            if grad is stand_in and not stand_in.zeroed:
                p.grad = self.held.local.pop(id(p), None)
            elif grad is stand_in:
                p.grad = None
                zeroed.add(id(p))
                lost.append(p)
            elif grad is not None and not self.stepped:
                p.grad = None
                raise NotSupported(error_texts.BY_HAND)
            else:
                if grad is not None:
                    made.append((p, grad))
                    p.grad = None
                if id(p) in self.graded:
                    self.graded.discard(id(p))
                    lost.append(p)
        if lost and self.graded == zeroed:
            self.discard()
            self.graded |= zeroed
        else:
            for p in lost:
                self.held.empty(p)
        for p, grad in made:
            p.grad = grad

    def _follow(self) -> None:
        """The stand-ins are off, and what the loop has put in their places, where the engine holds nothing, is the
        engine's: a rank's own, as a backward's (`p.grad = g` of torch.autograd.grad). Collective if there is any."""
        self.take_back()
        made = {} if self.held.some or self.stepped else {id(p): p.grad for p in self.trained if p.grad is not None}
        if made:
            for p in self.trained:
                p.grad = None
            self.seed(made)
            self.take_back()

    # -- what the loop calls -------------------------------------------------------------

    def enter(self) -> None:
        self.weights.remember(self.trained)
        if self.paused is None:
            self.count = 0
            self.handle.put_on()
            return
        for p, grad in zip(self.trained, self.paused, strict=True):
            p.grad = grad
        self.paused = None

    def pause(self) -> None:
        """The optimizer stays the engine's handle: what the cell has put around its `step` since is not to be lost."""
        self.take_back()
        if self._leaves_some:
            self._stand_in()
        self.paused = [p.grad for p in self.trained]
        for p in self.trained:  # in the notebook's form they have another dtype
            p.grad = None

    def used_up(self) -> dict[int, torch.Tensor]:
        """In a pause: what stands for gradients that a step has used up, and nobody has thrown away."""
        pairs = zip(self.trained, self.paused or (), strict=False) if self.stepped else ()
        return {id(p): grad for p, grad in pairs if grad is not None}

    def go_on(self, used: set[int]) -> None:
        """In a pause, after the engine was made anew: a step of the one before has used up the gradients of these."""
        self.handle.put_on()
        self.stepped = bool(used)
        self.taken = not used
        self.graded |= used
        self.paused = [
            stand_in if id(p) in used else None for p, stand_in in zip(self.trained, self.stand_ins, strict=True)
        ]

    # -- complete, and from one engine to the next -----------------------------------------

    def complete(self, named: bool) -> None:
        """What a step would take, of all parameters; `named`: some are to be shown. Collective."""
        self._follow()
        if self.stepped and named:
            raise NotSupported(error_texts.USED_UP)
        if named and self.graded - self.held.arrived:
            raise NotSupported(error_texts.ZEROS)
        if self.held.some:
            self.held.average()
        if self._leaves_some:
            self._stand_in()

    def drop(self, p: torch.Tensor) -> None:
        """In a pause: this one was set to None."""
        self.held.empty(p)
        self.graded.discard(id(p))
        paused = self.paused or []
        self.paused = [None if other is p else grad for other, grad in zip(self.trained, paused, strict=True)]
        if not self.held.arrived:
            self.discard()
            self.taken, self.paused = True, [None for _ in self.trained]

    def seed(self, gradients: dict[int, torch.Tensor]) -> None:
        """These are the engine's, as if a backward had brought them. Collective."""
        chosen = [p for p in self.trained if id(p) in gradients]
        with self.backward() as factor:
            self.open()
            original("torch.autograd.backward")(chosen, [gradients[id(p)].to(p.dtype) * factor for p in chosen])

    def leave(self) -> None:
        self.paused = None
        self.handle.take_off()
        self.reset()

    def step(self) -> None:
        with self.reader.suspended():
            self._step()

    def _step(self) -> None:
        parts, engine, zero = self.parts, self.engine, self.zero
        parts.check_frozen()
        self._follow()
        if self.stepped:  # and nobody has thrown them away since
            self.discard()
            raise NotSupported(error_texts.NOT_ZEROED)
        if isinstance(parts.inner, InnerOptimizer):
            parts.state.follow()
        if len(self.graded) != len(self.trained):
            found_gradients([id(p) in self.graded for p in self.trained], usual=True)
        self.count += 1
        if self.count <= FIRST or not self.count & (self.count - 1):
            self._compare()
        if not self.held.some:
            if self.graded:
                raise NotSupported(error_texts.ZEROS)
            return  # no gradients: one process would leave everything as it is
        inner = parts.inner
        missing = self._missing()
        self.weights.follow_edits(self.trained)
        if isinstance(inner, InnerOptimizer):
            inner.take_options()
            inner.missing = missing
        reduces, engine.enable_backward_allreduce = engine.enable_backward_allreduce, not self.held.reduced
        try:
            engine.step()
        except AttributeError as error:
            parts.tell_of_layers(error)
            raise
        finally:
            engine.enable_backward_allreduce = reduces
        overflow = bool(zero.overflow)
        self.skipped += overflow
        if overflow and not self.scaled and self.skipped == 1 and dist.get_rank() == 0:
            warnings.warn(error_texts.not_finite(self.stage), stacklevel=4)
        if self.weights.shown_copies:
            self.weights.stepped()
        if self.scaled:
            parts.loss_scale.stepped(overflow)
        if engine.lr_scheduler is not None:
            parts.show_rates()
        self._done()
        if isinstance(inner, InnerOptimizer):
            inner.give_options()
            parts.state.begin()
        self.stepped = True
        self._stand_in()

    def _done(self) -> None:
        dirty = self.held.some or bool(self.held.arrived)
        self.opened = self.stepped = False
        self.held.clear()
        self.parts.loss_scale.holding.discard(id(self))
        if dirty:  # once a step is enough
            self.parts.layout.wipe_gradients()
        self.weights.remember(self.trained)

    def _compare(self) -> None:
        try:
            compare(self.parts.device)
        except NotSupported as error:
            missing = self._names({id(p) for p in self.trained} - self.graded)
            raise NotSupported(error_texts.without_gradient_here(missing)) if missing else error from None

    def _missing(self) -> set[int]:
        """Ids of parameters that have no gradient, which a step leaves as they are: the same on every rank."""
        if len(self.graded) == len(self.trained):
            return set()
        missing = {id(p) for p in self.trained} - self.graded
        if not isinstance(self.parts.inner, InnerOptimizer):
            raise NotSupported(error_texts.without_gradient(self._names(missing)))
        if missing != self._agreed:
            here = torch.tensor([id(p) in missing for p in self.trained])
            if differing([here], self.parts.device)[0]:
                raise NotSupported(error_texts.without_gradient_here(self._names(missing)))
            self._agreed = missing
        return missing

    def _names(self, chosen: set[int]) -> list[str]:
        return [name for name, p in named_parameters(self.parts.component) if id(p) in chosen]

    # -- clipping, accumulating ----------------------------------------------------------

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """What there is now. Collective."""
        mine = {id(p) for p in self.trained}
        chosen = [p for p in parameters if id(p) in mine]
        if not chosen:
            return None
        self.complete(False)
        return self.held.clip(chosen, max_norm, norm_type) if self.held.some else torch.zeros(())

    # -- throwing away -------------------------------------------------------------------

    def discard(self) -> None:
        """What the engine holds of gradients is thrown away."""
        self.graded.clear()
        self.parts.layout.discard_gradients(self.trained)
        self._done()

    def reset(self) -> None:
        """A backward was cut short."""
        self.parts.layout.forget_backward()
        for p in self.trained:
            p.grad = None
        self.taken = True
        self.opened = False
        self.parts.inside = False
        self.discard()

    @contextmanager
    def backward(self) -> Iterator[float]:
        if any(map(TRAINABLE, self.parts.parameters)):  # else a loss of another model's: a GAN freezes one for it
            self.parts.check_frozen()  # before anything is sent: all ranks say it
        self._follow()
        if self.graded:  # which ones may be this rank's own
            wrote(True)
        if self.held.reduced:  # more is added to what stage 1 has averaged for the step: the mean of means is the mean
            gradients = self.held.full()
            self.discard()
            self.seed(gradients)
        factor = 1.0
        if self.scaled:
            factor = self.parts.loss_scale.begin()
            self.zero.override_loss_scale(factor)  # what is held now was made with it, or will be
        try:
            with self.reader.suspended():
                yield factor
            if self.taken and self._leaves_some:  # it went through other models only
                self._stand_in()
        except NbtrainError:
            raise
        except Exception as error:
            self.parts.tell_of_layers(error)
            sentence = MOVED if self.moved() else error_texts.of_backward(error, self.stage)
            if sentence is None:
                raise
            raise NotSupported(sentence) from error

    def moved(self) -> bool:
        """Whether a parameter has another dtype than the engine computes with."""
        return any(p.dtype != stand_in.dtype for p, stand_in in zip(self.trained, self.stand_ins, strict=True))

    def close(self) -> None:
        self.leave()
        self.zero.unregister_grad_acc_post_hooks()
