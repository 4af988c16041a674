"""The format to resume from: torch.distributed.checkpoint, one file per rank, every tensor flat.

Flat, because what a rank keeps of a tensor is a stretch of it under every strategy, but a rectangle under some only.
The shapes are in the tree. Nothing here is collective: who writes what was settled before, and what each rank has
written is put together from what it says about that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nbtrain.training.checkpoints.content import RankPart, TensorInfo
from nbtrain.training.checkpoints.safe_metadata import SafeReader


class _Planner(DefaultSavePlanner):
    """Hands over the parts; there is nothing to plan."""

    def __init__(self, parts: Iterable[RankPart]) -> None:
        super().__init__()
        self.parts = {(part.key, part.start): part for part in parts}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.index.offset is not None
        return self.parts[write_item.index.fqn, write_item.index.offset[0]].data


def write(folder: Path, rank: int, parts: Sequence[RankPart], described: Mapping[str, TensorInfo]) -> list[WriteResult]:
    """Write this rank's file. Returns what `conclude` has to know of it."""
    if not parts:
        return []
    writer = _writer(folder)
    items = [
        WriteItem(
            index=MetadataIndex(part.key, (part.start,)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(part.start, part.data.numel()),
                properties=TensorProperties(dtype=part.data.dtype),
                size=torch.Size((described[part.key].numel,)),
            ),
        )
        for part in parts
    ]
    plans = writer.prepare_global_plan([*[SavePlan([])] * rank, SavePlan(items)])  # it names the file after the place
    return writer.write_data(plans[rank], _Planner(parts)).wait()


def conclude(folder: Path, results: Sequence[list[WriteResult]], described: Mapping[str, TensorInfo]) -> None:
    """Write what lies where: on one rank, when all have written."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in described}
    for result in (one for of_rank in results for one in of_rank):
        index = result.index
        assert index.offset is not None
        chunks[index.fqn].append(_chunk(index.offset[0], 0))
    # Where one ends the next begins: the offsets say how long they are.
    for key, held in chunks.items():
        held.sort(key=lambda chunk: chunk.offsets[0])
        ends = [*(chunk.offsets[0] for chunk in held[1:]), described[key].numel]
        for i, end in enumerate(ends[: len(held)]):
            held[i] = _chunk(held[i].offsets[0], end - held[i].offsets[0])
    tensors: dict[str, Any] = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=one.dtype), size=torch.Size((one.numel,)), chunks=chunks[key]
        )
        for key, one in described.items()
    }
    _writer(folder).finish(Metadata(state_dict_metadata=tensors), list(results))


class ShardedReader:
    """Reads the tensors of such a folder, flat."""

    def __init__(self, folder: Path, weights_only: bool) -> None:
        self.folder = folder
        self.metadata = SafeReader(folder, weights_only).read_metadata()

    def read(self, key: str) -> torch.Tensor:
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        made = torch.empty(stored.size, dtype=stored.properties.dtype)
        reader, planner = FileSystemReader(self.folder), DefaultLoadPlanner()
        only = Metadata({key: stored}, storage_data=self.metadata.storage_data)
        planner.set_up_planner({key: made}, only, is_coordinator=True)
        reader.set_up_storage_reader(only, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        return made


def _writer(folder: Path) -> FileSystemWriter:
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # everything is in host memory already
    writer.set_up_storage_writer(is_coordinator=True)
    return writer


def _chunk(start: int, length: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size((start,)), sizes=torch.Size((length,)))
