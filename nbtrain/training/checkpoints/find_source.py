"""Opens a checkpoint: one of nbtrain, sharded or full, a folder of them, a safetensors file, or what DeepSpeed, torch
or Lightning have written.

All ranks open it together (`together`): each reads it, or one for all where it is held in memory.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.errors import NbtrainError, UsageError
from nbtrain.training.checkpoints import folder, full_format, other_formats, sharded_format
from nbtrain.training.checkpoints.rank_parts import Described
from nbtrain.training.ranks import collectives

ABOUT = "about"
"""The key under which the tree is stored, pickled, as bytes."""
FORMAT = 1


@dataclass(slots=True)
class CheckpointSource:
    """A checkpoint that can be read, one tensor after another."""

    path: Path
    tree: dict[str, Any]
    described: Mapping[str, Described]
    read: Callable[[str], torch.Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    """step, random states, positions of loops"""
    elsewhere: bool = False
    """not made by nbtrain: a model's tensors may have names below one that holds it (`net.0.weight`)"""
    costly: bool = False
    """held in memory whole: one rank reads, and sends it to the others"""


def packed(about: Mapping[str, Any]) -> torch.Tensor:
    out = io.BytesIO()
    torch.save(dict(about), out)
    return torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)


def find(path: Path) -> tuple[Path, str]:
    """What `load(path)` means, and a sentence where that needs saying. Raises if there is nothing."""
    if (
        folder.marker(path) is not None
        or path.is_file()
        or other_formats.is_deepspeed(path)
        or other_formats.is_torchs(path)
    ):
        return path, ""
    if made := folder.inside(path):
        newest, said = made[-1]
        return newest, f"{path}: the newest whole checkpoint in there is {newest.name} (step {said.get('step', '?')})"
    if (aside := folder.replaced_one(path)) is not None:
        return aside, f"{path} was about to be replaced when its process ended: the one from before is loaded"
    if path.is_dir() and len(list(path.glob(f"*{full_format.SUFFIX}"))) == 1:
        return next(path.glob(f"*{full_format.SUFFIX}")), ""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    raise UsageError(
        f"{path} is no checkpoint: it has no whole {folder.MARKER}, no single .safetensors file, and neither DeepSpeed "
        "nor torch.distributed.checkpoint has written it to its end. load() takes what save() has made, the folder of "
        "--save-to, a .safetensors file, a folder of one of these two, or a .ckpt of Lightning's"
    )


def open_source(path: Path) -> CheckpointSource:
    """`path`: as `find` gave it."""
    said = folder.marker(path) if path.is_dir() else None
    if said is not None and said.get("format", FORMAT) > FORMAT:
        raise UsageError(f"{path} was written by a newer nbtrain ({said.get('nbtrain')}): pip install -U nbtrain")
    if said is not None:
        return _full(path) if said.get("kind") == "full" else _sharded(path)
    if path.is_file():
        return _lightning(path) if path.suffix == ".ckpt" else _file(path)
    return _torchs(path) if other_formats.is_torchs(path) else _deepspeed(path)


def _sharded(path: Path) -> CheckpointSource:
    reader = sharded_format.ShardedReader(path)
    about = _about(reader.read(ABOUT))
    described = _described(about)
    return CheckpointSource(
        path, about["tree"], described, lambda key: reader.read(key).reshape(described[key].shape), about
    )


def _full(path: Path) -> CheckpointSource:
    training = full_format.FullReader(path / full_format.TRAINING)
    about = _about(training.read(ABOUT))
    tree = about["tree"]
    files = full_format.file_names(tree["modules"])
    where: dict[str, tuple[full_format.FullReader, str]] = {key: (training, key) for key in training.held}
    for name, module in tree["modules"].items():
        reader = full_format.FullReader(path / files[name])
        for inside, key in module["tensors"].items():
            where[key] = (reader, inside)
    return CheckpointSource(path, tree, _described(about), lambda key: where[key][0].read(where[key][1]), about)


def _file(path: Path) -> CheckpointSource:
    if path.suffix != full_format.SUFFIX:
        raise UsageError(
            f"{path} is no checkpoint of nbtrain's: load() takes folders, .safetensors files and .ckpt files of "
            "Lightning's. Of what torch.save has written: model.load_state_dict(torch.load(path))"
        )
    try:
        reader = full_format.FullReader(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return CheckpointSource(path, _weights_only(reader.held), reader.described(), reader.read)


def _lightning(path: Path) -> CheckpointSource:
    held = other_formats.lightnings(path)
    if held is None:
        raise UsageError(
            f"{path} was not written by Lightning's Trainer. Of what torch.save has written: "
            "model.load_state_dict(torch.load(path))"
        )
    described = {key: Described(tuple(value.shape), value.dtype) for key, value in held.items()}
    return CheckpointSource(path, _weights_only(held), described, lambda key: held[key].detach(), elsewhere=True)


def _torchs(path: Path) -> CheckpointSource:
    models, described, read = other_formats.torchs(path)
    modules = {name if len(models) > 1 else "": {"tensors": tensors, "extra": {}} for name, tensors in models.items()}
    return CheckpointSource(
        path, {"modules": modules, "optimizers": {}, "schedulers": {}}, described, read, elsewhere=True
    )


def _deepspeed(path: Path) -> CheckpointSource:
    """Put together when it is asked for: one rank is enough for that."""
    held = other_formats.weights(path)
    described = {key: Described(tuple(value.shape), value.dtype) for key, value in held.items()}
    return CheckpointSource(path, _weights_only(held), described, lambda key: held[key].detach(), costly=True)


def _weights_only(keys: Any) -> dict[str, Any]:
    return {"modules": {"": {"tensors": {key: key for key in keys}, "extra": {}}}, "optimizers": {}, "schedulers": {}}


def _about(data: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)
    return found


def _described(about: Mapping[str, Any]) -> dict[str, Described]:
    return {key: Described(tuple(shape), dtype) for key, (shape, dtype) in about["shapes"].items()}


SLOW = 2.0


def agree(check: Callable[[], Any]) -> None:
    """Raises on every rank what it raises on any. Collective."""
    error: NbtrainError | None = None
    try:
        check()
    except NbtrainError as found:
        error = found
    if collectives.connected():
        error = error or next((one for one in collectives.gather(error) if one is not None), None)
    if error is not None:
        raise error


def together(path: Path, say: Callable[[str], None]) -> CheckpointSource:
    """The source that rank 0 finds at this path, on every rank. Collective."""
    several = collectives.connected()
    lead = not several or dist.get_rank() == 0
    found: list[Any] = [None, ""]

    def look() -> None:
        if lead:
            found[:] = find(path)

    agree(look)
    if several:
        dist.broadcast_object_list(found, 0)
    where, sentence = found
    if sentence:
        say(sentence)
    opened: list[CheckpointSource] = []
    alone = several and folder.marker(where) is None and other_formats.is_deepspeed(where)
    agree(lambda: opened.append(open_source(where)) if lead or not alone else None)
    if alone:
        outline: list[Any] = [(one.tree, dict(one.described)) for one in opened] or [None]
        dist.broadcast_object_list(outline, 0)
        if not opened:
            tree, described = outline[0]
            opened.append(CheckpointSource(where, tree, described, lambda key: torch.empty(0), costly=True))
    return opened[0]


def reading(source: CheckpointSource, say: Callable[[str], None]) -> Callable[[str], torch.Tensor]:
    """A function that reads a tensor, and prints progress when loading is slow. Collective if the source is costly."""
    several = collectives.connected()
    lead = not several or dist.get_rank() == 0
    began, said, done = time.monotonic(), SLOW, 0
    every = sum(one.nbytes for one in source.described.values())

    def read(key: str) -> torch.Tensor:
        nonlocal said, done
        content = source.read(key) if lead or not source.costly else None
        if source.costly and several:
            content = _passed_on(content, source.described[key])
        assert content is not None
        done += content.nbytes
        if (since := time.monotonic() - began) > said:
            said = since + 5
            say(f"loading {source.path.name}: {done / 2**20:,.0f} of {every / 2**20:,.0f} MB")
        return content

    return read


def _passed_on(content: torch.Tensor | None, described: Described) -> torch.Tensor:
    """Rank 0's content, on every rank."""
    if content is None:
        content = torch.empty(described.shape, dtype=described.dtype)
    wire = content.contiguous().reshape(-1).view(torch.uint8)
    sent = wire.to(collectives.on_the_wire(wire))
    dist.broadcast(sent, 0)
    return sent.cpu().view(described.dtype).reshape(described.shape)
