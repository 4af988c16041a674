"""Opens a checkpoint: one of nbtrain, sharded or full, a folder of them, or a safetensors file.

All ranks open it together (`together`), and each reads it. What others have written is refused with the line of theirs
that reads it: whole weights go into a model under every strategy.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.worker.checkpoints import folder, safe_load, tensor_files
from nbtrain.worker.checkpoints.content import TensorInfo
from nbtrain.worker.ranks import collectives

ABOUT = "about"
"""The key under which the tree is stored, pickled, as bytes."""
FORMAT = 1
T = TypeVar("T")
OF_MEMORY = re.compile(r"(?i:can.t|cannot) allocate memory")
"""in errors of torch's allocator for the host, and of mmap"""
OF_TORCH = "what torch.save has written is read by model.load_state_dict(torch.load(path))"
OTHERS = {
    ".metadata": "torch.distributed.checkpoint has written it: torch.distributed.checkpoint.format_utils."
    "dcp_to_torch_save({path!r}, 'weights.pt') makes a file of it, and " + OF_TORCH,
    "latest": "DeepSpeed has written it: deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(model, "
    "{path!r}) in the notebook puts its weights into the model",
}
"""by a file in the folder, what reads it"""
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


def packed(about: Mapping[str, Any]) -> torch.Tensor:
    out = io.BytesIO()
    torch.save(dict(about), out)
    return torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)


def find(path: Path) -> tuple[Path, str]:
    """The checkpoint that `load(path)` means, and a sentence if that needs saying. Raises if there is none."""
    if folder.marker(path) is not None or path.is_file():
        return path, ""
    if made := folder.inside(path):
        newest, said = made[-1]
        return newest, f"{path}: the newest whole checkpoint in there is {newest.name} (step {said.get('step', '?')})"
    if (aside := folder.replaced_one(path)) is not None:
        return aside, f"{path} was about to be replaced when its process ended: the one from before is loaded"
    if path.is_dir() and len(files := list(path.glob(f"*{tensor_files.SUFFIX}"))) == 1:
        return files[0], ""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    others = [f". {said.format(path=str(path))}" for name, said in OTHERS.items() if (path / name).is_file()]
    raise UsageError(
        f"{path} is no checkpoint of nbtrain's: it has no whole {folder.MARKER} and no single .safetensors file. "
        f"load() takes what save() has made, the folder of --save-to, or a .safetensors file{''.join(others)}"
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
    return _file(path)


def _sharded(path: Path, weights_only: bool) -> CheckpointSource:
    reader = tensor_files.PartsReader(path)
    about = _about(reader.read(ABOUT, torch.uint8), path, weights_only)
    described = _described(about)

    def read(key: str) -> torch.Tensor:
        info = described[key]
        return reader.read(key, info.dtype).reshape(info.shape)

    return CheckpointSource(path, about["tree"], described, read, about)


def _full(path: Path, weights_only: bool) -> CheckpointSource:
    training = tensor_files.FileReader(path / tensor_files.TRAINING)
    about = _about(training.read(ABOUT), path, weights_only)
    tree = about["tree"]
    files = tensor_files.file_names(tree["modules"])
    where: dict[str, tuple[tensor_files.FileReader, str]] = {key: (training, key) for key in training.held}
    for name, module in tree["modules"].items():
        reader = tensor_files.FileReader(path / files[name])
        for inside, key in module["tensors"].items():
            where[key] = (reader, inside)
    return CheckpointSource(path, tree, _described(about), lambda key: where[key][0].read(where[key][1]), about)


def _file(path: Path) -> CheckpointSource:
    if path.suffix != tensor_files.SUFFIX:
        raise UsageError(
            f"{path} is no checkpoint of nbtrain's: load() takes folders and .safetensors files; {OF_TORCH}, what "
            "Lightning's Trainer has by model.load_state_dict(torch.load(path)['state_dict'])"
        )
    reader = tensor_files.FileReader(path)
    if {ABOUT, tensor_files.part_name(ABOUT, 0)} & reader.held.keys():
        raise UsageError(
            f"{path.parent} is a checkpoint of nbtrain's with files that are gone or were cut: it is damaged. Nothing "
            "was changed"
        )
    tree = {"modules": {"": {"tensors": {key: key for key in reader.held}, "extra": {}}}}
    return CheckpointSource(path, {**tree, "optimizers": {}, "schedulers": {}}, reader.described(), reader.read)


def _about(data: torch.Tensor, path: Path, weights_only: bool) -> dict[str, Any]:
    about: dict[str, Any] = safe_load.plain(io.BytesIO(data.numpy().tobytes()), path, weights_only)
    return about


def _described(about: Mapping[str, Any]) -> dict[str, TensorInfo]:
    return {key: TensorInfo(tuple(shape), dtype) for key, (shape, dtype) in about["shapes"].items()}


def agree(check: Callable[[], T]) -> T:
    """Run this on every rank and return what it returns, or raise on all of them what it raises on any. Collective."""
    result: Any = None
    error: NbtrainError | None = None
    try:
        result = check()
    except NbtrainError as failure:
        error = failure
    every = collectives.gather(error)  # also on a rank with an error: the others wait for it here
    error = error or next((other for other in every if other is not None), None)
    if error is not None:
        raise error
    return cast("T", result)


def together(path: Path, say: Callable[[str], None], weights_only: bool = True) -> CheckpointSource:
    """Open on every rank what rank 0 finds at this path. Collective."""
    several = collectives.connected()
    lead = not several or dist.get_rank() == 0
    where, sentence = collectives.gather(agree(lambda: find(path) if lead else None))[0]
    if sentence:
        say(sentence)
    return agree(lambda: open_source(where, weights_only))


def reading(source: CheckpointSource, say: Callable[[str], None]) -> Callable[[str], torch.Tensor]:
    """A function that reads a tensor, and prints progress when loading is slow."""
    began, said, done = time.monotonic(), SLOW, 0
    every = sum(info.nbytes for info in source.described.values())

    def read(key: str) -> torch.Tensor:
        nonlocal said, done
        content = source.read(key)
        done += content.nbytes
        if (since := time.monotonic() - began) > said:
            said = since + 5
            say(f"loading {source.path.name}: {done / 2**20:,.0f} of {every / 2**20:,.0f} MB")
        return content

    return read
