"""Opens a checkpoint: one of nbtrain, sharded or full, a folder of them, a safetensors file, or what DeepSpeed, torch
or Lightning have written.

All ranks open it together (`together`): each reads it, or one for all where it is held in memory. Of what others have
written the weights are taken: DeepSpeed's partitions are put together; a folder of torch.distributed.checkpoint and a
file of Lightning's are read tensor by tensor.
"""

from __future__ import annotations

import io
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nbtrain.errors import NbtrainError, UsageError
from nbtrain.training.checkpoints import folder, full_format, safe_load
from nbtrain.training.checkpoints.content import TensorInfo
from nbtrain.training.ranks import collectives

ABOUT = "about"
"""The key under which the tree is stored, pickled, as bytes."""
FORMAT = 1
T = TypeVar("T")
OF_OPTIMIZERS = ("optim", "sched")
"""How parts of a checkpoint of torch.distributed.checkpoint begin that hold no weights."""
OF_MEMORY = re.compile(r"(?i:can.t|cannot) allocate memory")
"""in errors of torch's allocator for the host, and of mmap"""
LIGHTNING = "pytorch-lightning_version"
SLOW = 2.0
"""Seconds of loading after which its progress is printed."""


@dataclass(slots=True)
class CheckpointSource:
    """A checkpoint that can be read, one tensor after another."""

    path: Path
    tree: dict[str, Any]
    described: Mapping[str, TensorInfo]
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
    """The checkpoint that `load(path)` means, and a sentence if that needs saying. Raises if there is none."""
    if folder.marker(path) is not None or path.is_file() or _is_deepspeed(path) or _is_torchs(path):
        return path, ""
    if made := folder.inside(path):
        newest, said = made[-1]
        return newest, f"{path}: the newest whole checkpoint in there is {newest.name} (step {said.get('step', '?')})"
    if (aside := folder.replaced_one(path)) is not None:
        return aside, f"{path} was about to be replaced when its process ended: the one from before is loaded"
    if path.is_dir() and len(files := list(path.glob(f"*{full_format.SUFFIX}"))) == 1:
        return files[0], ""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    raise UsageError(
        f"{path} is no checkpoint: it has no whole {folder.MARKER}, no single .safetensors file, and neither DeepSpeed "
        "nor torch.distributed.checkpoint has written it to its end. load() takes what save() has made, the folder of "
        "--save-to, a .safetensors file, a folder of one of these two, or a .ckpt of Lightning's"
    )


def open_source(path: Path, weights_only: bool = True) -> CheckpointSource:
    """Open what `find` has found. `weights_only`: as `torch.load`'s."""
    try:
        return _opened(path, weights_only)
    except safe_load.DAMAGED as error:
        if isinstance(error, torch.OutOfMemoryError) or OF_MEMORY.search(str(error)):
            raise
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"{path} is damaged, or no checkpoint: {what}. Nothing was changed") from error


def _opened(path: Path, weights_only: bool) -> CheckpointSource:
    said = folder.marker(path) if path.is_dir() else None
    if said is not None and said.get("format", FORMAT) > FORMAT:
        raise UsageError(f"{path} was written by a newer nbtrain ({said.get('nbtrain')}): pip install -U nbtrain")
    if said is not None:
        return _full(path, weights_only) if said.get("kind") == "full" else _sharded(path, weights_only)
    if path.is_file():
        return _lightning(path, weights_only) if path.suffix == ".ckpt" else _file(path)
    return _torchs(path, weights_only) if _is_torchs(path) else _deepspeed(path, weights_only)


def _sharded(path: Path, weights_only: bool) -> CheckpointSource:
    from nbtrain.training.checkpoints import sharded_format  # see rank_imports.py

    reader = sharded_format.ShardedReader(path, weights_only)
    about = _about(reader.read(ABOUT), path, weights_only)
    described = _described(about)
    return CheckpointSource(
        path, about["tree"], described, lambda key: reader.read(key).reshape(described[key].shape), about
    )


def _full(path: Path, weights_only: bool) -> CheckpointSource:
    training = full_format.FullReader(path / full_format.TRAINING)
    about = _about(training.read(ABOUT), path, weights_only)
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
    reader = full_format.FullReader(path)
    if ABOUT in reader.held:
        raise _incomplete(path.parent)
    return CheckpointSource(path, _weights_only(reader.held), reader.described(), reader.read)


def _incomplete(path: Path) -> UsageError:
    return UsageError(
        f"{path} is a checkpoint of nbtrain's with files that are gone or were cut: it is damaged. Nothing was changed"
    )


def _lightning(path: Path, weights_only: bool) -> CheckpointSource:
    """The weights in a checkpoint file of Lightning's Trainer. They are read when they are asked for."""
    saved = safe_load.weights(path, weights_only)
    if not isinstance(saved, dict) or LIGHTNING not in saved:
        raise UsageError(
            f"{path} was not written by Lightning's Trainer. Of what torch.save has written: "
            "model.load_state_dict(torch.load(path))"
        )
    held = {key: value for key, value in saved["state_dict"].items() if isinstance(value, torch.Tensor)}
    return _of_tensors(path, held, elsewhere=True)


def _is_torchs(path: Path) -> bool:
    """Whether torch.distributed.checkpoint has written this folder, in full: this file is the last."""
    return (path / ".metadata").is_file()


def _torchs(path: Path, weights_only: bool) -> CheckpointSource:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nbtrain.training.checkpoints.safe_metadata import SafeReader

    metadata = SafeReader(path, weights_only).read_metadata()
    described = {
        key: TensorInfo(tuple(one.size), one.properties.dtype)
        for key, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    if ABOUT in described:
        raise _incomplete(path)
    whole_path: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    models: dict[str, dict[str, str]] = {}
    for key in described:
        *holder, name = map(str, whole_path.get(key, (key,)))
        if not any(part.startswith(OF_OPTIMIZERS) for part in holder):
            models.setdefault(".".join(holder), {})[name] = key

    def read(key: str) -> torch.Tensor:
        one = described[key]
        found = {key: torch.empty(one.shape, dtype=one.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no other process takes part
            checkpoint.load(found, storage_reader=SafeReader(path, weights_only), no_dist=True)
        return found[key]

    modules = {name if len(models) > 1 else "": {"tensors": tensors, "extra": {}} for name, tensors in models.items()}
    return CheckpointSource(
        path, {"modules": modules, "optimizers": {}, "schedulers": {}}, described, read, elsewhere=True
    )


def _is_deepspeed(path: Path) -> bool:
    """Whether it is a folder with the file `latest`, or the folder of one step in there."""
    return path.is_dir() and (_has_states(path) or ((path / "latest").is_file() and _has_states(_newest(path))))


def _deepspeed(path: Path, weights_only: bool) -> CheckpointSource:
    """The whole model in 32 bits, which takes as much host memory: one rank is enough for that."""
    step = path if _has_states(path) else _newest(path)
    return _of_tensors(path, _deepspeed_weights(path, step, weights_only), costly=True)


def _deepspeed_weights(path: Path, step: Path, weights_only: bool) -> Mapping[str, torch.Tensor]:
    if not list(step.glob("*zero_pp_rank_*_optim_states.pt")):  # stage 0, or no optimizer: the weights are whole
        states = safe_load.weights(min(step.glob("*_model_states.pt")), weights_only)
        return {key: value for key, value in states["module"].items() if isinstance(value, torch.Tensor)}
    if find_spec("deepspeed") is None:
        raise UsageError(
            f"{path} was written by DeepSpeed in {len(list(step.glob('*_optim_states.pt')))} partitions, and only "
            "DeepSpeed can put them together: pip install deepspeed"
        )
    before = dict(os.environ)
    try:
        from nbtrain.strategies.deepspeed.library import imported

        imported(torch.device("cpu"))
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it tells of every partition
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(step.parent), tag=step.name))
    finally:
        for name in os.environ.keys() - before.keys():  # DeepSpeed's import sets some
            del os.environ[name]


def _newest(path: Path) -> Path:
    return path / (path / "latest").read_text().strip()


def _has_states(path: Path) -> bool:
    return path.is_dir() and next(path.glob("*_model_states.pt"), None) is not None


def _of_tensors(path: Path, held: Mapping[str, torch.Tensor], **what: Any) -> CheckpointSource:
    """A source of weights that are in memory. `what`: its other fields."""
    described = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in held.items()}
    return CheckpointSource(path, _weights_only(held), described, lambda key: held[key].detach(), **what)


def _weights_only(keys: Any) -> dict[str, Any]:
    return {"modules": {"": {"tensors": {key: key for key in keys}, "extra": {}}}, "optimizers": {}, "schedulers": {}}


def _about(data: torch.Tensor, path: Path, weights_only: bool) -> dict[str, Any]:
    found: dict[str, Any] = safe_load.plain(io.BytesIO(data.numpy().tobytes()), path, weights_only)
    safe_load.check_taken(path, found, later=("extra", "options", "state", *safe_load.GOES_ON))
    return found


def _described(about: Mapping[str, Any]) -> dict[str, TensorInfo]:
    return {key: TensorInfo(tuple(shape), dtype) for key, (shape, dtype) in about["shapes"].items()}


def agree(check: Callable[[], T]) -> T:
    """Run this on every rank and return what it returns, or raise on all of them what it raises on any. Collective."""
    found: Any = None
    error: NbtrainError | None = None
    try:
        found = check()
    except NbtrainError as failure:
        error = failure
    every = collectives.gather(error)  # also on a rank with an error: the others wait for it here
    error = error or next((one for one in every if one is not None), None)
    if error is not None:
        raise error
    return cast("T", found)


def together(path: Path, say: Callable[[str], None], weights_only: bool = True) -> CheckpointSource:
    """Open on every rank what rank 0 finds at this path. Collective."""
    several = collectives.connected()
    lead = not several or dist.get_rank() == 0
    where, sentence = collectives.gather(agree(lambda: find(path) if lead else None))[0]
    if sentence:
        say(sentence)
    alone = several and folder.marker(where) is None and _is_deepspeed(where)
    opened = agree(lambda: open_source(where, weights_only) if lead or not alone else None)
    if alone:
        tree, described = collectives.gather((opened.tree, dict(opened.described)) if opened is not None else None)[0]
        if opened is None:
            opened = CheckpointSource(where, tree, described, lambda key: torch.empty(0), costly=True)
    assert opened is not None
    return opened


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


def _passed_on(content: torch.Tensor | None, described: TensorInfo) -> torch.Tensor:
    """Rank 0's content, on every rank."""
    if content is None:
        content = torch.empty(described.shape, dtype=described.dtype)
    wire = content.contiguous().reshape(-1).view(torch.uint8)
    sent = wire.to(collectives.on_the_wire(wire))
    dist.broadcast(sent, 0)
    return sent.cpu().view(described.dtype).reshape(described.shape)
