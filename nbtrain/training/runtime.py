"""Everything that runs on a rank around a strategy, as the one object the worker uses.

Functions of torch replaced by `install`, and why:

    torch.autograd.backward              accumulation; a backward cut short is forgotten
    clip_grad_norm_, clip_grad_value_    a strategy may know better; accumulation
    DataLoader.__iter__, _index_sampler  batches are dealt out; counting
    _BaseDataLoaderIter.__init__         the order of batches is drawn from a stream that all ranks share
    randperm, for random_split           so are splits
    _BaseDataLoaderIter.__next__         batches go to the rank's device; counting
    all_reduce, broadcast, …             nobody waits for ranks that will not come
    GradScaler.scale                     refused where the strategy scales losses
    GradScaler.step                      a step that is passed over has ended, too
    torch.save                           one file, written once
    Optimizer.__init__, add_param_group  models that the cell makes are set up
    nn.Module.__setstate__               a copied model is one that the cell made
    _NormBase.reset_running_stats        update_bn counts the batches of all ranks
    nn.Module.__call__                   what a model computes in, where that is not 32 bits
    GradScaler.scale, zero_grad,         loss scaling, under 16-mixed
    Tensor.retain_grad
    Tensor.__deepcopy__                  copies of weights in 16 bits
    and what is in `lines`

Besides, torch's two global optimizer hooks are used. `uninstall` puts everything back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from nbtrain.errors import NotSupported, UsageError
from nbtrain.events import Event, Metric
from nbtrain.exchange.fingerprint import checksum
from nbtrain.patches import Patches
from nbtrain.specs import RankInfo, RunSpec
from nbtrain.strategies.base import Strategy
from nbtrain.training import collectives, lines
from nbtrain.training.accumulate import Accumulation
from nbtrain.training.agreement import Agreement
from nbtrain.training.become import become
from nbtrain.training.board import BACKWARD, STEP, Board
from nbtrain.training.checkpoints import here
from nbtrain.training.checkpoints.core import Checkpoints
from nbtrain.training.checkpoints.every import Plan
from nbtrain.training.contract import share_of
from nbtrain.training.data import Deal
from nbtrain.training.loaders import Loaders
from nbtrain.training.lowered import Lowered, LoweredStrategy
from nbtrain.training.made import Made
from nbtrain.training.meeting import Meeting
from nbtrain.training.norms import Recounted
from nbtrain.training.precision import Forwards, chosen
from nbtrain.training.prepare import Replaced, Workshop
from nbtrain.training.randomness import Randomness
from nbtrain.training.recompute import Recompute
from nbtrain.training.resumable import resumable
from nbtrain.training.saving import Saving
from nbtrain.training.scaling import Scaling
from nbtrain.training.speakers import Speakers
from nbtrain.training.steps import Steps
from nbtrain.training.stopping import Stopping

_installed: Runtime | None = None


class Runtime:
    """One per rank and strategy. `install`, then per cell: `begin`, the cell, `end`."""

    def __init__(
        self,
        info: RankInfo,
        strategy: Strategy,
        emit: Callable[[Event], None],
        randomness: Randomness | None = None,
        replaced: Replaced = become,
        precision: str = "32",
    ) -> None:
        """`randomness`: of the runtime before this one. A rank's streams outlive a change of strategy: the notebook
        sends its own only when they have changed. `replaced`: whom to tell of tensors that others were put in the
        place of."""
        self.info = info
        self.strategy = strategy
        strategy.place = info
        self.emit = emit
        self.device = torch.device(info.device)
        self.steps = Steps(info.rank)
        self.randomness = randomness or Randomness(info.rank, info.world_size, self.device.type == "cuda")
        self.randomness.index = info.rank if strategy.hands_off else share_of(strategy, info.rank, info.world_size)[0]
        self.format = chosen(precision, strategy, self.device)
        self.lowered: Lowered | None = None
        if self.format is not None and self.format.weights:
            self.lowered = Lowered(self.format.dtype, info.rank)
        sets_up = strategy if self.lowered is None else LoweredStrategy(strategy, self.lowered)
        self.workshop = Workshop(sets_up, self.device, info.world_size, replaced, precision)
        self.forwards = Forwards(self.format, self.device) if self.format else None
        self.scaling: Scaling | None = None
        if self.forwards is not None and self.forwards.form.scaled:
            self.scaling = Scaling(lambda: self._looks_after and info.world_size > 1, lambda: self.steps.ends)
            self.forwards.before, self.forwards.after = self.scaling.called, self.scaling.passed
        self.loaders = Loaders(self.randomness, self.steps, self.device, info.rank)
        self.accumulation: Accumulation | None = None
        self.running = False
        self.stopping = Stopping(info.rank, self.steps)
        self.checkpoints = Checkpoints(info, strategy, self.workshop, self.randomness, self.steps)
        self.checkpoints.scaling = self.scaling
        self.loaders.positions = self.checkpoints.positions
        self.meeting = Meeting(info.rank, info.world_size, self.steps, self._within)
        self.saving = Saving(self.meeting)
        self.recompute = Recompute()
        self.made = Made(lambda: self._looks_after, self._set_up_made)
        self.recounted = Recounted(lambda: self._looks_after)
        self.loaders.at_end = self.recounted.share
        self._looks_after = False
        """all ranks run a cell whose models the strategy sets up"""
        self._agreement = Agreement()
        self._patches = Patches()
        self._in_backward = False
        self._in_step = False
        """a strategy may reduce gradients there, and not in the backward"""
        self._prepared: Mapping[str, object] | None = None
        """what `begin` is about to be called for"""

    # --- per process -----------------------------------------------------------------------------

    def install(self) -> None:
        """Replace what has to be replaced in torch. Once; another runtime of this process is uninstalled first."""
        global _installed
        if _installed is self:
            return
        if _installed is not None:
            _installed.uninstall()
        patches = self._patches
        for part in (self.forwards, self.scaling, self.lowered):
            if part is not None:
                part.patch(patches)
        patches.wrap(torch.autograd, "backward", self._backward)
        for name, make in (("clip_grad_norm_", self._clip_norm), ("clip_grad_value_", self._clip_value)):
            for module in (torch.nn.utils.clip_grad, torch.nn.utils):
                patches.wrap(module, name, make)
        patches.wrap(torch.amp.GradScaler, "scale", self._scaler_scale)
        patches.wrap(torch.amp.GradScaler, "step", self._scaler_step)
        self.loaders.patch(patches)
        self.meeting.patch(patches)
        if self.info.world_size > 1 or self.lowered is not None:
            self.made.patch(patches)
        if self.info.world_size > 1:
            self.recounted.patch(patches)
            lines.patch(patches, lambda: self.running and not self.strategy.hands_off, self.device)
            self.saving.patch(patches)
        patches.keep(register_optimizer_step_pre_hook(self._before_step))
        patches.keep(register_optimizer_step_post_hook(self._after_step))
        _installed = self

    def uninstall(self, whole: bool = True) -> None:
        """Put torch back as it was. `whole`: what is in pieces is put together again, which is collective."""
        global _installed
        self.workshop.forget(whole)
        self._patches.undo()
        if _installed is self:
            _installed = None

    # --- per cell --------------------------------------------------------------------------------

    def prepare(self, objects: Mapping[str, object], board: Board | None = None, number: int = 0) -> None:
        """What the cell uses; it looks to the notebook as before. Collective. `number`: of this run, on all ranks."""
        self.meeting.begin(board, number)
        self.saving.begin()
        self.workshop.prepare(objects)
        self._prepared = objects

    def begin(
        self, run: RunSpec, objects: Mapping[str, object], board: Board | None = None, number: int = 0
    ) -> list[str]:
        """The cell is about to run, on what was prepared, or is now; sentences for the user. Collective."""
        if self._prepared is not objects:
            self.prepare(objects, board, number)
        self._prepared = None
        names = () if self.strategy.hands_off else run.checkpoint_activations
        self.recompute.begin(names, [item for item in objects.values() if isinstance(item, torch.nn.Module)])
        self.workshop.enter()
        index, count = share_of(self.strategy, self.info.rank, self.info.world_size) if run.sampler else (0, 1)
        deal = Deal(index=index, count=count, split=run.split_batches)
        self.steps.begin(item for item in objects.values() if isinstance(item, Optimizer))
        self.stopping.begin(board, number)
        self.loaders.begin(deal, self.strategy.hands_off)
        if run.accumulate > 1:
            self.accumulation = Accumulation(
                run.accumulate, lambda: self.steps.at_last_batch, lambda: self.workshop.prepared
            )
            self.accumulation.enter(item for item in objects.values() if isinstance(item, Optimizer))
        self.checkpoints.begin(objects, Plan.of(run), run.resume, run.ranks)
        here.enter(self.checkpoints)
        self.running = True
        if not self.strategy.hands_off and run.ranks is None:
            self.made.begin()
            self.recounted.begin()
            self._looks_after = self.info.world_size > 1 or self.lowered is not None
            self.randomness.together()
        if self.scaling is not None:
            self.scaling.begin(item for item in objects.values() if isinstance(item, Optimizer))
        if self.forwards is not None:
            self.forwards.on = True
        self.recompute.on()
        if self.strategy.hands_off:
            return []
        who = "ranks" if count == self.info.world_size else "groups of ranks"
        return [*_batch_notes(objects, deal, run.accumulate, who), *self._notes()]

    def _within(self) -> int:
        return BACKWARD if self._in_backward else STEP if self._in_step else 0

    def end(self, ok: bool) -> list[str]:
        """After the cell, whether it succeeded or not; sentences for the user."""
        self.running = self._looks_after = False
        self._in_backward = self._in_step = False
        here.enter(None)
        self.checkpoints.end()
        if self.forwards is not None:
            self.forwards.on = False
        notes = self.scaling.end(self.steps.calls) if self.scaling is not None else []
        self.recompute.off()
        self.randomness.apart()
        self.stopping.end()
        self.meeting.end(ok)
        if self.accumulation is not None:
            self.accumulation.leave()
            self.accumulation = None
        if not ok:
            self._reset()
        self.workshop.leave()
        if self.lowered is not None:
            self.lowered.release(prepared.component for prepared in self.workshop.prepared)
        return [*notes, *self.loaders.end()]

    def agreement(self) -> list[tuple[str, int]]:
        """(name, number) pairs that must be equal on all ranks. Only of what may have changed since the last call."""
        return self._agreement.take(self.workshop.prepared, self.steps.total, self.randomness)

    def builtins(self) -> dict[str, Any]:
        """The names every cell may use."""
        return {
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "local_rank": self.info.local_rank,
            "device": self.device,
            "log": self.log,
            **Speakers(self.strategy, self.info.rank, self.info.world_size).names(),
            "barrier": collectives.barrier,
            "setup": self.setup,
            "save": here.save,
            "load": here.load,
            "resumable": resumable,
        }

    # --- what the cell calls ---------------------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Show numbers on the run's chart: `log(loss=loss)`."""
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"log({name}=...) takes a number or a tensor with one element, not {type(value).__name__}"
                ) from None
        self.emit(Metric(rank=self.info.rank, time=time.time(), step=self.steps.count, values=numbers))

    def setup(self, *objects: Any) -> Any:
        """Prepare what was made inside the cell, with rank 0's weights: `model, optimizer = setup(model, optimizer)`.

        Collective: every rank has to call it. The very same objects are returned.
        """
        self.recompute.learn(item for item in objects if isinstance(item, torch.nn.Module))
        named = {f"{type(item).__name__}#{i}": item for i, item in enumerate(objects)}
        self.workshop.prepare(named)
        self.checkpoints.add(named)
        if self.randomness.shared_states and not (self.randomness.alone or self.strategy.hands_off):
            # Rank 0's weights: so its draws for them were those of one process, and the next order of batches follows.
            stand = self.randomness.stand()
            collectives.equalise([stand], checksum)
            self.randomness.stand_at(stand)
        if self.scaling is not None:
            self.scaling.look_again()
        if self.accumulation is not None:
            for item in objects:
                if isinstance(item, Optimizer):
                    self.accumulation.gate(item)
        return objects[0] if len(objects) == 1 else objects

    # --- what torch calls ------------------------------------------------------------------------

    def _set_up_made(self, models: list[torch.nn.Module], optimizer: Optimizer) -> None:
        ready = self.workshop.is_ready(optimizer)
        if not ready or self.workshop.divides(optimizer):
            self.workshop.sweep(models=not ready)
            self.setup(*models, optimizer)
            copies = self.made.alike(models, lambda p: id(p) in self.workshop.ready)
            counts = collectives.gather(len(copies))
            if any(counts) and any(map(self.workshop.in_pieces, models)):  # they are to meet in sums: in pieces as well
                if len(set(counts)) > 1:
                    raise NotSupported(UNLIKE.format(name=type(models[0]).__name__))
                self.setup(*copies)
            elif len(set(counts)) == 1:  # an average may be kept on rank 0 alone
                collectives.equalise([t for copy in copies for t in (*copy.parameters(), *copy.buffers())], checksum)
        elif self.accumulation is not None:
            self.accumulation.gate(optimizer)

    def _notes(self) -> list[str]:
        """What strategies have to say of how they set something up."""
        said = [note for prepared in self.workshop.prepared for note in prepared.notes]
        for prepared in self.workshop.prepared:
            prepared.notes = []
        return list(dict.fromkeys(said))

    def _reset(self) -> None:
        for prepared in self.workshop.prepared:
            prepared.reset()

    def _backward(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if not self.running or self._in_backward:  # checkpointed layers run backwards inside of backwards
                return old(tensors, grad_tensors, *args, **kwargs)
            self.randomness.apart()
            self.steps.backward()
            self._in_backward, self._in_step = True, False  # a step before may have failed
            run = old if self.scaling is None else self.scaling.backward(old)
            try:
                with ExitStack() as around:
                    # One loss may go through several models; what it counts is the same for all of a strategy's.
                    shares = [around.enter_context(prepared.backward()) for prepared in self.workshop.prepared]
                    share = next((one for one in shares if one != 1.0), 1.0)
                    if self.accumulation is not None:
                        share *= around.enter_context(self.accumulation.backward())
                    if share != 1.0:
                        grad_tensors = _scaled(tensors, grad_tensors, share)
                    return run(tensors, grad_tensors, *args, **kwargs)
            except BaseException:
                self._reset()
                raise
            finally:
                self._in_backward = False

        return backward

    def _clip_norm(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return old(parameters, max_norm, norm_type, *args, **kwargs)
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if self.accumulation is not None and not self.accumulation.due:
                max_norm = float("inf")  # only the sum of the group is clipped; the norm so far is returned
            for prepared in self.workshop.prepared:
                norm = prepared.clip(held, max_norm, norm_type)
                if norm is not None:
                    return norm
            return old(held, max_norm, norm_type, *args, **kwargs)

        return clip

    def _clip_value(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self.running and self.accumulation is not None and not self.accumulation.due:
                return None
            if self.running:
                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                for prepared in self.workshop.prepared:
                    prepared.clip_value(parameters, args[0] if args else kwargs.get("clip_value", 0.0))
            return old(parameters, *args, **kwargs)

        return clip

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.running:
            return None
        several = self.info.world_size > 1 and not self.strategy.hands_off
        if several:
            self.workshop.guard(optimizer)
        if self.accumulation is not None:
            self.accumulation.check(optimizer)
        found = self.scaling.before_step(optimizer, args, kwargs) if self.scaling is not None else None
        if several and (common := _with_common_loss(*(found or (args, kwargs)))) is not None:
            found = common
        self._in_step = several
        return found

    def _scaler_scale(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.running and self.strategy.own_precision and scaler.is_enabled():
                raise NotSupported(
                    f"a GradScaler of your own cannot see the gradients under {type(self.strategy).__name__}, which "
                    "scales losses by itself: leave the scaler out and write --precision 16-mixed, or take "
                    "--strategy ddp"
                )
            return old(scaler, *args, **kwargs)

        return scale

    def _scaler_step(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.steps.calls
            result = old(scaler, optimizer, *args, **kwargs)
            if self.running and self.steps.calls == before:
                self.steps.passed_over(optimizer)
            return result

        return step

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.running:
            return
        self._in_step = False
        if self.scaling is not None and self.scaling.after_step(optimizer):
            self.steps.passed_over(optimizer)
        else:
            self.steps.stepped(optimizer)


UNLIKE = (
    "some ranks have made a copy of {name} that others have not: under fsdp models and their copies are divided among "
    "all ranks, together. Copy it on every rank, or use --strategy ddp"
)


def _with_common_loss(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of `step`, whose closure now returns the mean of the ranks' losses. LBFGS decides by the loss when
    it has searched enough: by losses of their own the ranks would part, and wait for each other for ever."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def common() -> Any:
        loss = closure()
        return collectives.reduce(loss) if isinstance(loss, (torch.Tensor, float)) else loss

    return ((args[0], common, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": common})


def _scaled(tensors: Any, grads: Any, share: float) -> Any:
    """The gradients a backward starts from, times `share`."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [grads] * len(roots) if grads is None or isinstance(grads, torch.Tensor) else list(grads)
    if any(grad is None and root.numel() != 1 for root, grad in zip(roots, given, strict=False)):
        return grads  # torch says what is wrong
    return [
        torch.full_like(root, share) if grad is None else grad * share for root, grad in zip(roots, given, strict=False)
    ]


def _batch_notes(objects: Mapping[str, object], deal: Deal, accumulate: int, who: str) -> list[str]:
    """The effective batch, once per batch size: `batch 32 × 4`. `who`: sees a share of the batches."""
    notes: list[str] = []
    for loader in (item for item in objects.values() if isinstance(item, DataLoader)):
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int) or isinstance(size, bool):
            continue
        note = f"batch {size}"
        if deal.count > 1:
            note += f" split over {deal.count} {who}" if deal.split else f" × {deal.count}"
        if accumulate > 1:
            note += f" × {accumulate} accumulated"
        if note not in notes and note != f"batch {size}":
            notes.append(note)
    return notes
