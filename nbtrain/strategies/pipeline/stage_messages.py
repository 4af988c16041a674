"""What ranks send each other under `pipeline`: any nest of tensors and other things, and what a stage's code raised.

First a head of fixed size says what comes, then come the tensors. Sending does not wait: a stage computes its next
micro-batch while the one before is on its way.

What a stage's code raises, every rank raises: a cell that catches it goes on alike on all of them. A forward tells of
it with what goes to every rank anyway. A backward tells the stages before; the ones behind go on meanwhile, and hear of
it where all ranks meet next, so that it costs nothing where nothing fails.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nbtrain.base.errors import RAISED_BY, NotSupported
from nbtrain.compat import pytree

HEAD = 1024
"""bytes that go before the tensors and say what they are; more follow if these do not do"""
ALONE = (
    "Under pipeline a model is spread over all ranks, so that calling it, or a part of it, needs every rank: evaluate "
    "on every rank (all see the same batches), not below `if rank == 0:`. Under --strategy ddp a rank may run a "
    "forward alone"
)
THIN = (
    "a stage returns a sparse tensor, which cannot be sent to the next under pipeline: let the module return "
    "tensor.to_dense(), or use --strategy ddp"
)
UNSENDABLE_ERROR = (
    "rank {rank} raised {name}: {text}. Under pipeline all ranks raise what the stage of one did, and this one cannot "
    "be sent to them ({why}): raise one that pickle can copy, a ValueError say, or use --strategy ddp"
)

Packed = tuple[bytes, list[torch.Tensor]]


@contextmanager
def advising(sentence: str = ALONE) -> Iterator[None]:
    """Around a collective: what is said to a rank that comes alone ends with this sentence."""
    try:
        yield
    except NotSupported as error:
        raise NotSupported(f"{error}. {sentence}") from None


def fingerprint(given: Iterable[Any]) -> int:
    """A number made of tensors' forms and, where that is cheap, of their content."""
    number = 0
    for t in given:
        if isinstance(t, torch.Tensor):
            number = zlib.crc32(repr((tuple(t.shape), t.dtype)).encode(), number)
            if t.device.type == "cpu" and t.numel() and t.layout is torch.strided:
                some = t.detach().reshape(-1)[: 1 << 16]
                total = some.sum(dtype=torch.float64 if t.is_floating_point() else None)
                number = zlib.crc32(repr(total.item()).encode(), number)
    return number


def meet(failures: StageErrors, device: torch.device, numbers: dict[str, int]) -> None:
    """All ranks are here, with the same numbers, or raise: who waits for another stage afterwards does not wait in
    vain. `numbers`: by what is said where they differ. Collective."""
    both = [sign * number for number in numbers.values() for sign in (1, -1)]
    together = torch.tensor([*both, int(failures.found is not None)], device=device)
    with advising():
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
    *extremes, failed = together.tolist()
    if failed:
        failures.agree()
    for sentence, largest, smallest in zip(numbers, extremes[::2], extremes[1::2], strict=True):
        if largest != -smallest:
            raise NotSupported(sentence)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in what is pickled."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class StageChannel:
    """One rank's connections to the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self._back: tuple[Any, Any] = (None, None)

    def put(self, message: Packed, to: int, back: bool = False) -> None:
        for tensor in (*heads(message[0], self.device), *message[1]):
            if tensor.numel():
                work = dist.isend(tensor, to, group=self._group(back), tag=int(back))
                self._under_way.append((work, tensor))

    def receive(self, source: int, back: bool = False) -> Any:
        def get(tensor: torch.Tensor) -> None:
            dist.recv(tensor, source, group=self._group(back), tag=int(back))

        return self._receive(get)

    def share(self, value: Any, source: int, message: Packed | None = None) -> Any:
        """From one rank to all. `message`: it is packed already."""
        if dist.get_rank() == source:
            said, tensors = message or packed(value)
            for tensor in (*heads(said, self.device), *tensors):
                if tensor.numel():
                    _share(tensor, source)
            return value
        return self._receive(lambda tensor: _share(tensor, source))

    def settle(self) -> None:
        """Wait until what was sent has arrived."""
        while self._under_way:
            work, _ = self._under_way.pop(0)
            if work is not None:
                work.wait()

    def forget(self) -> None:
        self._under_way.clear()

    def _receive(self, get: Callable[[torch.Tensor], None]) -> Any:
        said = read_bytes(get, self.device)

        def taken(slot: Slot) -> torch.Tensor:
            tensor = slot.empty(self.device)
            if tensor.numel():
                get(tensor)
            return tensor.requires_grad_(slot.requires_grad)

        return pytree.tree_map_only(Slot, taken, pickle.loads(said))

    def _group(self, back: bool) -> Any:
        """NCCL does what goes between two ranks in one order: what goes back has a group of its own there."""
        if not back or dist.get_backend() != "nccl":
            return None
        if self._back[0] is not dist.group.WORLD:
            self._back = dist.group.WORLD, dist.new_group()
        return self._back[1]


def _share(tensor: torch.Tensor, source: int) -> None:
    dist.broadcast(tensor.reshape(-1).view(torch.uint8), source)


def heads(said: bytes, device: torch.device) -> list[torch.Tensor]:
    """What `read_bytes` reads, to be sent one after the other."""
    first = len(said).to_bytes(8, "little") + said[: HEAD - 8]
    heads = [torch.frombuffer(bytearray(first.ljust(HEAD, b"\0")), dtype=torch.uint8)]
    if rest := said[HEAD - 8 :]:
        heads.append(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
    return [head.to(device) for head in heads]


def read_bytes(get: Callable[[torch.Tensor], None], device: torch.device) -> bytes:
    """`get`: fills a tensor with what another rank sends."""
    head = torch.empty(HEAD, dtype=torch.uint8, device=device)
    get(head)
    content: bytes = head.cpu().numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    if (more := length + 8 - HEAD) > 0:
        rest = torch.empty(more, dtype=torch.uint8, device=device)
        get(rest)
        content += rest.cpu().numpy().tobytes()
    return content[8 : 8 + length]


def packed(value: Any) -> Packed:
    """As it is sent. Raises where it cannot be."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> Slot:
        if tensor.layout is not torch.strided:
            raise NotSupported(THIN)
        tensors.append(tensor.detach().contiguous())
        return Slot(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    slots = pytree.tree_map_only(torch.Tensor, slot, value)
    try:
        return pickled(slots), tensors
    except Exception as error:  # whatever an object of the user's says
        raise NotSupported(
            f"what a stage returns cannot be sent to the next under pipeline ({error}): let modules return tensors in "
            "tuples, lists or dicts, or use --strategy ddp"
        ) from None


def pickled(value: Any) -> bytes:
    """What goes beside the tensors."""
    out = io.BytesIO()
    _TensorPickler(out).dump(value)
    return out.getvalue()


class _TensorPickler(pickle.Pickler):
    """Refuses tensors inside objects: only their content would arrive, and no gradient would go back."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError("an object of a class of its own holds a tensor")
        return NotImplemented


# --- what a stage raised -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageFailure:
    """Goes to other ranks in the place of what a stage was to make."""

    rank: int
    said: bytes
    """the error"""


class StageErrors:
    """What one rank knows of errors in the code of stages."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.found: StageFailure | None = None
        """that some rank has failed, and not all know yet"""
        self._error: Exception | None = None
        """this rank's own"""

    def take(self, error: Exception) -> StageFailure:
        """Note an error that this rank's code has raised."""
        if self.found is None:
            said = _error_bytes(error)
            if isinstance(said, str):
                text = UNSENDABLE_ERROR.format(rank=self.rank, name=type(error).__name__, text=error, why=said)
                self._error = NotSupported(text)
                self._error.__cause__ = error
                said = pickle.dumps(self._error)
            else:
                self._error = error
            self.found = StageFailure(self.rank, said)
        return self.found

    def know(self, value: Any) -> None:
        """Note a failure, if that is what another rank has sent."""
        if isinstance(value, StageFailure) and self.found is None:
            self.found = value

    def forget(self) -> None:
        self.found = self._error = None

    def agree(self) -> None:
        """Some rank has failed: find out what, and raise it on all. Collective."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self.found)
        self.fail(next(error for error in everybody if error is not None))

    def fail(self, failure: StageFailure) -> NoReturn:
        """Raise it. All ranks are here, with the same failure."""
        error = self._error
        self.forget()
        if failure.rank != self.rank or error is None:
            error = _opened(failure.said)
        with suppress(AttributeError):  # a class with slots
            setattr(error, RAISED_BY, failure.rank)
        raise error


def is_everywhere(error: BaseException) -> bool:
    """Every rank raises it."""
    return hasattr(error, RAISED_BY)


def _error_bytes(error: Exception) -> bytes | str:
    """As it is sent; a sentence that says why it cannot be."""
    cls = type(error)
    # Pickle would call an `__init__` of the user's once more, with what it had given to its base.
    own = isinstance(cls.__init__, FunctionType) and cls.__reduce__ is BaseException.__reduce__
    try:
        said = pickle.dumps((cls, error.args, vars(error)) if own else error)
        _opened(said)
    except Exception as why:  # its class may do anything
        return str(why) or type(why).__name__
    return said


def _opened(said: bytes) -> Exception:
    opened = pickle.loads(said)
    if isinstance(opened, tuple):
        cls, args, attributes = opened
        opened = cls.__new__(cls, *args)
        vars(opened).update(attributes)
    if not isinstance(opened, Exception):
        raise TypeError(f"it comes back as {type(opened).__name__}")
    return opened
