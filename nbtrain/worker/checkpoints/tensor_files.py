"""Files of a checkpoint: safetensors, a JSON header and then the bytes of tensors, one after another.

To go on from:

    rank-0.safetensors …    what each rank keeps: stretches of flattened tensors, as under every strategy

To publish, from which plain PyTorch loads the weights:

    model.safetensors       the weights under the keys of the model's own state dict
    training.safetensors    everything else that going on needs

In these each rank writes what it keeps at its place: nobody puts the model together.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.worker.checkpoints.content import RankPart, TensorInfo

TRAINING = "training.safetensors"
SUFFIX = ".safetensors"
OF_RANK = "rank-{}.safetensors"
WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
DTYPES = {word: dtype for dtype, word in WORDS.items()}


@dataclass(frozen=True, slots=True)
class BytePlace:
    """Where a tensor is: its first byte."""

    file: str
    at: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Header and size of each file, and where each key goes; tied weights go to several places."""

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    places: Mapping[str, Sequence[BytePlace]]


def file_names(modules: Iterable[str]) -> dict[str, str]:
    """The file of each model's weights."""
    names = list(modules)
    if len(names) == 1:
        return {names[0]: f"model{SUFFIX}"}
    files: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^\w.-]", "_", name).strip(".") or "model"
        taken = {TRAINING, *files.values()}
        files[name] = next(
            file for i in range(1, len(names) + 3) if (file := f"{stem}{f'-{i}' if i > 1 else ''}{SUFFIX}") not in taken
        )
    return files


def layout(tree: Mapping[str, Any], described: Mapping[str, TensorInfo]) -> FileLayout:
    files = file_names(tree["modules"])
    contents: dict[str, dict[str, str]] = {}  # file → name in it → key
    weights = set()
    for name, module in tree["modules"].items():
        contents[files[name]] = dict(module["tensors"])
        weights |= set(module["tensors"].values())
    contents[TRAINING] = {key: key for key in described if key not in weights}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    places: dict[str, list[BytePlace]] = {key: [] for key in described}
    for file, keys in contents.items():
        for name, key in keys.items():
            if described[key].dtype not in WORDS:
                raise NotSupported(
                    f"full=True: {name} is {str(described[key].dtype).removeprefix('torch.')}, which safetensors does "
                    "not know. Save without full=True"
                )
        headers[file], starts, length = _header({name: described[key] for name, key in keys.items()})
        sizes[file] = len(headers[file]) + length
        for name, at in starts.items():
            places[keys[name]].append(BytePlace(file, len(headers[file]) + at))
    return FileLayout(headers, sizes, places)


def _header(infos: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a file with these tensors, where the bytes of each begin behind it, and how many there are."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name in sorted(infos, key=lambda name: -infos[name].dtype.itemsize):  # so that all are aligned
        info, starts[name] = infos[name], at
        header[name] = {"dtype": WORDS[info.dtype], "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts, at


def part_name(key: str, start: int) -> str:
    """What a stretch of a tensor is called in a rank's own file."""
    return f"{key}@{start}"


def write_parts(folder: Path, rank: int, parts: Iterable[RankPart]) -> None:
    """Write this rank's own file. What safetensors has no word for is bytes there; the tree knows what it is."""
    tensors = {
        part_name(part.key, part.start): _bytes(part.data) if part.data.dtype not in WORDS else part.data
        for part in parts
    }
    header, starts, _ = _header({name: TensorInfo(tuple(data.shape), data.dtype) for name, data in tensors.items()})
    with open(folder / OF_RANK.format(rank), "wb") as out:
        out.write(header)
        for name in starts:
            out.write(memoryview(_bytes(tensors[name]).numpy()))
        out.flush()
        os.fsync(out.fileno())


def write(folder: Path, parts: Iterable[RankPart], laid: FileLayout, lead: bool) -> None:
    """Write what this rank keeps at its places in the files; the `lead` writes the headers."""
    opened: dict[str, int] = {}
    try:
        for file, header in laid.headers.items():
            if lead:
                opened[file] = _open(folder / file)
                os.ftruncate(opened[file], laid.sizes[file])
                _put(opened[file], header, 0)
        for part in parts:
            data = memoryview(_bytes(part.data).numpy()) if part.data.numel() else memoryview(b"")
            for place in laid.places[part.key]:
                if place.file not in opened:
                    opened[place.file] = _open(folder / place.file)
                _put(opened[place.file], data, place.at + part.start * part.data.dtype.itemsize)
        for handle in opened.values():
            os.fsync(handle)
    finally:
        for handle in opened.values():
            os.close(handle)


class FileReader:
    """The tensors of one file. Nothing is read before it is asked for."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= 2**27:
                raise ValueError(f"{file.name} is no safetensors file")
            header = json.loads(stream.read(length))
            self.start = 8 + length
            room = os.fstat(stream.fileno()).st_size - self.start
        self.held: dict[str, dict[str, Any]] = {key: entry for key, entry in header.items() if key != "__metadata__"}
        for key, entry in self.held.items():
            (a, b), dtype = entry["data_offsets"], DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"{key} in {file.name} is {entry['dtype']}, which is no dtype that nbtrain knows")
            size = math.prod(entry["shape"]) * dtype.itemsize
            if not 0 <= a <= b <= room or b - a != size or min(entry["shape"], default=0) < 0:
                raise ValueError(f"{key} in {file.name} is not where its header says")

    def described(self) -> dict[str, TensorInfo]:
        return {key: TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]]) for key, entry in self.held.items()}

    def size(self, key: str) -> int:
        a, b = self.held[key]["data_offsets"]
        return int(b - a)

    def read(self, key: str) -> torch.Tensor:
        entry = self.held[key]
        a, b = entry["data_offsets"]
        data = torch.empty(b - a, dtype=torch.uint8)
        if b > a:
            with open(self.file, "rb") as stream:
                stream.seek(self.start + a)
                if stream.readinto(memoryview(data.numpy())) != b - a:
                    raise ValueError(f"{self.file} ends in the middle of {key}")
        return data.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


class PartsReader:
    """The tensors of all ranks' own files, flat."""

    def __init__(self, folder: Path) -> None:
        self._parts: dict[str, list[tuple[int, FileReader, str]]] = {}
        for file in folder.glob(OF_RANK.format("*")):
            reader = FileReader(file)
            for name in reader.held:
                key, _, start = name.rpartition("@")
                self._parts.setdefault(key, []).append((int(start), reader, name))

    def read(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        parts = self._parts.get(key, ())  # none of a tensor without numbers
        flat = torch.empty(sum(reader.size(name) for _, reader, name in parts) // dtype.itemsize, dtype=dtype)
        for start, reader, name in parts:
            part = reader.read(name).view(dtype)
            flat[start : start + part.numel()] = part
        return flat


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8)


def _open(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)


def _put(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written
