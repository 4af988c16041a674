"""The file of torch.distributed.checkpoint that says what lies where: torch opens it as any pickle, which runs code."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

from nbtrain.compat import pickling
from nbtrain.training.checkpoints.safe_load import refused

OTHERS: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": collections.OrderedDict,
    pickling.LAYOUT: pickling.layout,
}


class SafeReader(FileSystemReader):
    """Opens none but torch's own classes in there."""

    def __init__(self, path: Path, weights_only: bool) -> None:
        super().__init__(path)
        self._folder, self._weights_only = path, weights_only

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        if not self._weights_only:
            return super().read_metadata(*args, **kwargs)
        with open(self._folder / ".metadata", "rb") as file:
            found = _MetadataUnpickler(file, self._folder).load()
        if not isinstance(found, metadata.Metadata):
            raise ValueError("its .metadata is none")
        found.storage_meta = getattr(found, "storage_meta", None) or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        for one in (metadata, filesystem):
            kind = getattr(one, name, None) if module == one.__name__ else None
            if isinstance(kind, type) and kind.__module__ == module:  # what it has imported is another's
                return kind
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath
        if f"{module}.{name}" not in OTHERS:
            raise refused(self._path, [f"{module}.{name}"])
        return OTHERS[f"{module}.{name}"]
