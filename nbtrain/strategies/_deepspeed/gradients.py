"""Between `loss.backward()` and `optimizer.step()`: the plain loop's calls become the engine's.

The engine holds the gradients. Each parameter's `grad` is a stand-in (see held.py), so that code which looks at
gradients or changes them by hand is noticed, and so that setting them to None, however that is done, is what it means:
the engine's are thrown away, too. It stays there after the step, as in one process a gradient would.
"""

from __future__ import annotations

import math
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbtrain.errors import NbtrainError, NotSupported
from nbtrain.strategies._deepspeed.held import Held
from nbtrain.strategies._deepspeed.norms import norm_of_pieces, norm_of_sum

if TYPE_CHECKING:
    from nbtrain.strategies._deepspeed.engine import Engined


BY_HAND = (
    "a gradient was assigned by hand, and under deepspeed the engine holds the gradients: take the strategy ddp for "
    "loops that make their own (torch.autograd.grad, edited gradients)"
)


SPENT = (
    "under deepspeed stage 3 a forward can be used by one backward only: weights are gathered for its layers once. "
    "retain_graph, gradient penalties (create_graph) and models whose outputs hide their tensors in objects work under "
    "stages 1 and 2, and under the strategy ddp"
)


NOT_ZEROED = (
    "the last step's gradients were not set to None or zero: in one process they would be stepped once more, or new "
    "ones added to them, and under deepspeed the engine has forgotten them: call optimizer.zero_grad() in each step, "
    "or take the strategy ddp"
)


CLIPPED = (
    "a backward between clip_grad_norm_ and the step: under deepspeed stage 1 clipped gradients are reduced already. "
    "Clip once, right before the step, or take --stage 2, or the strategy ddp"
)


def in_backward() -> bool:
    """This thread is inside of one: what runs now is recomputed, or a hook."""
    return torch._C._current_graph_task_id() != -1


def unreadable(p: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """In the parameter's shape, one number in memory."""
    kind = dtype if dtype is not None and p.is_floating_point() else p.dtype
    return torch.full((), math.nan, dtype=kind, device=p.device).expand(p.shape)


class Gradients:
    """Made when the engine is; `enter` and `leave` with each cell."""

    def __init__(self, owner: Engined) -> None:
        self.owner = owner
        self.engine = engine = owner.engine
        self.zero = engine.optimizer
        self.stage = owner.stage
        self.rank = dist.get_rank()  # a cell may destroy the group
        self.trained = owner.trained
        self.user = owner.user
        self.skipped = 0
        self.held = False
        """some backward has left gradients with the engine"""
        self.taken = True
        """the stand-ins are off"""
        self.opened = self.ended = False
        self.local: dict[int, torch.Tensor] = {}
        """stage 1 keeps this rank's own gradients, where the stand-ins are now"""
        self.arrived: set[int] = set()
        self.stepped = False
        """the stand-ins are those of gradients that a step has used up"""
        self.stale = False
        """others were added to such"""
        self.reduced = False
        """stage 1: they are, before the step"""
        self.norm = 0.0
        self.max_norm = 0.0
        """of a clip, until the step"""
        self.clipping = float(self.zero.clip_grad)
        self.stand_ins = [Held.of(p, _dtype(owner, p)) for p in self.trained]
        self.scaled = owner.precision.startswith("16")
        self._warned = False
        self.versions: dict[int, int] = {}
        """of weights, to see what the loop has changed by hand (stage 3)"""
        self._before: dict[str, Any] = {}
        self._listen()

    # -- the engine's own hooks ----------------------------------------------------------

    def _listen(self) -> None:
        engine, zero = self.engine, self.zero
        first = engine._backward_prologue

        def prologue() -> None:
            if self.opened and zero._backward_active_depth:  # several forwards in one backward open it once
                return
            self.take_back()
            if self.ended:  # another backward without a forward in between
                zero.clear_backward_seen_flag()
            self.opened, self.ended = True, False
            if self.scaled:
                engine._manual_backward_expected = True
            first()
            zero._backward_active_depth = 1  # a hook of a parameter may have entered already

        engine._backward_prologue = prologue
        zero.unregister_grad_acc_post_hooks()
        zero.register_grad_acc_post_hook(self._after_backward)  # which calls the engine's
        if self.scaled:
            zero.torch_autocast_gradscaler = None
            zero.override_loss_scale(self.owner.loss_scale.value)
        name = "reduce_ready_partitions_and_remove_grads" if self.stage == 3 else "process_gradients"
        plain: Callable[..., Any] = getattr(zero, name)
        arrived = self.arrived

        def noted(p: torch.Tensor, *args: Any) -> Any:
            if not self.opened:  # by a way on which no output of a new forward lay
                if self.stage == 3 and not self.owner.inside:  # inside: by a method that trains
                    raise NotSupported(SPENT)
                prologue()
            arrived.add(id(p))
            return plain(p, *args)

        setattr(zero, name, noted)

    def _after_backward(self) -> None:
        self.opened, self.ended = False, True
        if not self.arrived and not self.held:  # gradients of inputs alone (torch.autograd.grad): nothing to reduce
            self.zero.exit_backward()
            return
        self.engine._backward_post_hook()
        self.held = True
        self.owner.loss_scale.holding.add(id(self))
        self._stand_in()

    def _stand_in(self) -> None:
        for p, stand_in in zip(self.trained, self.stand_ins, strict=True):
            if p.grad is not None and p.grad is not stand_in:
                self.local[id(p)] = p.grad
            p.grad = stand_in
            stand_in.zeroed = False
        self.taken = False

    def take_back(self) -> None:
        """The stand-ins go, and it is seen what the user has done to them."""
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
                raise NotSupported(BY_HAND)
        if emptied and kept:
            raise NotSupported(
                "the gradients of some parameters were set to None, and DeepSpeed's engine holds all of them together: "
                "freeze parameters with requires_grad_(False) in a cell before, or take the strategy ddp"
            )
        if emptied:
            self.discard()
        elif self.stepped:
            self.stale = True

    # -- what the loop calls -------------------------------------------------------------

    def enter(self) -> None:
        self._remember()
        own = vars(self.user)
        self._before = {name: own.get(name) for name in ("step", "zero_grad")}
        step: Any = types.MethodType(_hooked(self._user_step), self.user)
        vars(step.__func__)["_wrapped_by_lr_sched"] = True  # schedulers look for it, to warn of steps they cannot see
        own["step"] = step
        own["zero_grad"] = types.MethodType(_zero_grad, self.user)

    def leave(self) -> None:
        own = vars(self.user)
        for name, before in self._before.items():
            mine = own.get(name)
            function = getattr(mine, "__func__", None)
            if function is None or not (function is _zero_grad or getattr(function, "nbtrain_of", None) is self):
                continue  # a scheduler that the cell made has put its wrapper around it
            if before is None:
                del own[name]
            else:
                own[name] = before
        for p in self.trained:
            p.grad = None
        self.taken = True
        self.local.clear()
        self.discard()

    def _user_step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        if not self.owner.entered:  # a wrapper of a cell that is over still leads here
            return type(optimizer).step(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self.step()
        return loss

    def step(self) -> None:
        owner, engine, zero = self.owner, self.engine, self.zero
        self._check_frozen()
        self.take_back()
        if self.stale:
            self.discard()
            raise NotSupported(NOT_ZEROED)
        if not self.held:
            if any(p.grad is not None for p in self.trained):
                raise NotSupported(BY_HAND)
            return  # no gradients: one process would leave everything as it is
        self._warn_of_missing()
        self.follow_edits()
        if hasattr(owner.inner, "take_options"):
            owner.inner.take_options()
        if self.scaled:
            zero.override_loss_scale(owner.loss_scale.value)
        zero.clip_grad = self.max_norm or self.clipping
        reduces, engine.enable_backward_allreduce = engine.enable_backward_allreduce, not self.reduced
        try:
            engine.step()
        finally:
            zero.clip_grad = self.clipping
            engine.enable_backward_allreduce = reduces
        overflow = bool(zero.overflow)
        self.skipped += overflow
        if overflow and not self.scaled:
            self._warn_of_skipping()
        if self.scaled:
            owner.loss_scale.stepped(overflow)
        if engine.lr_scheduler is not None:
            self._show_rates()
        self._done()
        self.stepped = True
        self._stand_in()

    def _show_rates(self) -> None:
        """A scheduler of the config's has moved them: the user's groups say so, and bring it home."""
        for group, number in zip(self.zero.param_groups, self.owner.sources, strict=True):
            shown = self.user.param_groups[number]
            shown.update({name: group[name] for name in ("lr", "betas", "momentum") if name in group and name in shown})

    def _done(self) -> None:
        self.held = self.opened = self.ended = self.stepped = self.stale = self.reduced = False
        self.max_norm = 0.0
        self.arrived.clear()
        self.local.clear()
        self.owner.loss_scale.holding.discard(id(self))
        self._wipe()
        self._remember()

    def _wipe(self) -> None:
        """Buffers that would step a parameter without a gradient by its last one."""
        zero = self.zero
        if self.stage == 3:
            zero.grad_partitions_flat_buffer.zero_()
        offloaded = zero.offload_optimizer if self.stage == 3 else zero.cpu_offload
        if offloaded:
            for flat in self.owner.layout.flats:
                if flat.grad is not None and flat.grad.numel():
                    flat.grad.zero_()

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Weights that the loop has changed by hand are those that are stepped. What stage 3 has in pieces cannot be
        written to."""
        zero, layout = self.zero, self.owner.layout
        if self.stage != 3:
            for flat, parts in zip(layout.flats, zero.parallel_partitioned_bit16_groups, strict=True):
                mine = parts[self.rank]
                if flat.device == mine.device and flat.dtype == mine.dtype:
                    flat.data.copy_(mine)
            return
        for p in self.trained:
            if p._version != self.versions.get(id(p)) and p.ds_status.name == "AVAILABLE":  # type: ignore[attr-defined]
                share = layout.shares[id(p)]
                part = p.data.reshape(-1)[share.start : share.stop]
                p.ds_tensor.data[: len(part)].copy_(part)  # type: ignore[attr-defined]
                layout.flats[share.flat].data.narrow(0, share.at, len(part)).copy_(part)

    def _remember(self) -> None:
        if self.stage == 3:
            self.versions = {id(p): p._version for p in self.trained}

    def _check_frozen(self) -> None:
        owner = self.owner
        if [p.requires_grad for p in owner.component.parameters()] != owner.requires:
            raise NotSupported(
                "requires_grad was changed inside of the cell, and DeepSpeed's engine was set up for what it was "
                "before: freeze or thaw layers in a cell of their own, or take the strategy ddp"
            )

    def _warn_of_missing(self) -> None:
        if self._warned or len(self.arrived) >= len(self.trained):
            return
        self._warned = True
        missing = [p for p in self.trained if id(p) not in self.arrived]
        names = [n for m in self.owner.models for n, p in m.named_parameters() if any(p is one for one in missing)]
        if dist.get_rank() == 0:
            warnings.warn(
                f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} got no gradient in this step, and DeepSpeed "
                "steps such parameters with zeros: weight decay and earlier momentum move them, which in one process "
                "they would not",
                stacklevel=5,
            )

    def _warn_of_skipping(self) -> None:
        if self.skipped > 1 or dist.get_rank():
            return
        more = (
            "; under stage 3 weights have no content outside of the model's forward: is a penalty on them computed "
            "there?"
            if self.stage == 3
            else ""
        )
        warnings.warn(f"gradients were not finite, and DeepSpeed leaves such a step out{more}", stacklevel=5)

    # -- clipping, accumulating ----------------------------------------------------------

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """The norm is that of now; the clipping is the step's. Collective."""
        asked = {id(p) for p in parameters if p.requires_grad}
        mine = {id(p) for p in self.trained}
        if not asked & mine:
            return None
        if not mine <= asked or asked - mine - {id(p) for p in self.owner.component.parameters()}:
            raise NotSupported(
                "clip_grad_norm_ of some of an optimizer's parameters: DeepSpeed clips all that one optimizer trains "
                "by their common norm; clip model.parameters(), or take the strategy ddp"
            )
        if float(norm_type) != 2.0:
            raise NotSupported(f"clip_grad_norm_(norm_type={norm_type:g}): DeepSpeed knows the 2-norm; or take ddp")
        if not self.held or all(p.grad is None for p in self.trained):  # there is nothing that could be clipped
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
            return norm_of_pieces(zero, self.owner.layout, self.owner.device)
        self.take_back()
        if not to_step and not self.reduced:
            mine = (self.local_of(p) for p in self.trained)
            norm = norm_of_sum((torch.zeros_like(p) if g is None else g for p, g in mine), int(zero.reduce_bucket_size))
        else:
            if not self.reduced:  # as the step would
                engine._running_engine_step = True
                try:
                    engine.allreduce_gradients()
                finally:
                    engine._running_engine_step = False
                self.reduced = True
            norm = zero.scaled_global_norm()
        self._stand_in()
        return norm

    @staticmethod
    def local_of(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return p, p.grad if p.grad is not None else getattr(p, "grad_accum", None)

    def _clip_now(self) -> None:
        """More is to be added to what was clipped."""
        if self.reduced:
            raise NotSupported(CLIPPED)
        if self.held and self.max_norm:
            self.multiply(min(1.0, self.max_norm / (self.norm + 1e-6)))
            self.max_norm = 0.0

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        zero = self.zero
        if self.stage == 3:
            zero.grad_partitions_flat_buffer.mul_(factor)
            return
        found = [getattr(p, "grad_accum", None) for p in self.trained]
        found += [*self.local.values(), *getattr(zero, "accumulated_grads_in_cpu", {}).values()]
        for table in (zero.all_grad_tensors, zero.averaged_gradients):
            found += [grad for grads in table.values() for grad in grads or ()]
        for grad in {id(grad): grad for grad in found if grad is not None}.values():
            grad.mul_(factor)

    # -- throwing away -------------------------------------------------------------------

    def discard(self) -> None:
        """What the engine holds of gradients is thrown away."""
        zero = self.zero
        zero.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            table = getattr(zero, name, None)
            if isinstance(table, dict):
                table.clear()
        for p in self.trained:
            if hasattr(p, "grad_accum"):
                p.grad_accum = None
        if self.stage != 3:
            zero.micro_step_id = -1
        for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
            if hasattr(zero, name):
                setattr(zero, name, set())
        if hasattr(zero, "norm_for_param_grads"):
            zero.norm_for_param_grads = {}
        self._done()

    def reset(self) -> None:
        """A backward was cut short."""
        zero = self.zero
        hooks = zero._backward_hook_state
        hooks.reset_for_new_step()
        hooks.remaining_grad_acc_hooks = hooks.backward_active_depth = 0
        for bucket in zero.ipg_buckets.values():
            if self.stage == 3:
                bucket.clear_params()
            else:
                bucket.clear()
        already = zero.params_already_reduced
        for key in already if isinstance(already, dict) else range(len(already)):
            already[key] = False
        for p in self.trained:
            p.grad = None
        self.taken = True
        self.opened = self.ended = False
        self.owner.inside = False
        self.discard()

    @contextmanager
    def backward(self) -> Iterator[float]:
        self.take_back()
        self._clip_now()
        factor = self.owner.loss_scale.begin() if self.scaled else 1.0
        try:
            yield factor
            if self.taken and (self.held or self.stepped):  # it went through other models only
                self.stale &= self.held
                self._stand_in()
        except NbtrainError:
            raise
        except Exception as error:
            again = self.stage == 3 and "single memory location" in str(error)  # added to a stand-in
            sentence = SPENT if again else _sentence(error, self.stage)
            if sentence is None:
                raise
            raise NotSupported(sentence) from error

    def close(self) -> None:
        self.leave()
        self.zero.unregister_grad_acc_post_hooks()


def _dtype(owner: Engined, p: torch.Tensor) -> torch.dtype:
    """What the model computes with."""
    return p.dtype if p.dtype.is_floating_point else owner.shapes[id(p)][1]


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """With torch's hooks around it, which see one step of the user's optimizer."""

    def user_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(optimizer, *args, **kwargs)

    wrapped: Any = Optimizer.profile_hook_step(user_step)
    wrapped.nbtrain_of = step.__self__  # type: ignore[attr-defined]
    return wrapped  # type: ignore[no-any-return]


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Stand-ins cannot be zeroed; None means the same to the engine. Looked up now: `--accumulate` keeps it quiet."""
    type(optimizer).zero_grad(optimizer, True)


def _sentence(error: BaseException, stage: int) -> str | None:
    """In the user's words; None: it is not DeepSpeed's."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    frames = [name.replace("\\", "/") for name in frames]
    # What a hook of the user's raises, or a handler of a signal, passes through DeepSpeed, too.
    if not any("/deepspeed/runtime/" in name for name in frames) or not re.search("/(deepspeed|torch)/", frames[-1]):
        return None
    first = str(error).partition("\n")[0]
    return (
        f"DeepSpeed cannot follow this backward under stage {stage} ({type(error).__name__}: {first}). The plain loop, "
        "accumulation and several models work; other ways through the graph work under the strategy ddp"
    )
