"""Every function of torch that takes a tensor, to be played with tensors that ranks have in pieces.
How each is called is found by trying."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import get_overridable_functions

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.kit.row_shards import whole

CALLS = (
    "f(w)", "f(w, v)", "f(w, 2)", "f(w, 0)", "f(w, 0.5)", "f(w, v, v)", "f(w, 0, v)", "f(w, -1, 1)", "f(w, o)",
    "f(w, -0.1, 0.1)", "f(w, v, 0.5)", "f(w, w > 0, 0.0)", "f(w, 0, i)", "f(w, 0, i, v[:2])", "f(w, 0, i, 2.0)",
    "f([w, v])", "f([w, v], 2.0)", "f([w, v], [v, w])", "f(w, 0, 1, 2)", "f(w, (5, 7))", "f(w, (7, 5))", "f(w, v.T)",
    "f(w > 0, w, v)", "f(w, (i, i), v[:2, 0])",
)  # fmt: skip
"""`w` and `v` are in pieces, `o` is an ordinary tensor, `i` picks two rows."""
NOT_FOUND = frozenset({
    "__dlpack__", "__reduce_ex__", "_clear_non_serializable_cached_data", "__repr__", "__hash__", "data_ptr", "storage",
    "untyped_storage", "const_data_ptr", "share_memory_", "is_shared", "record_stream", "empty_like", "is_set_to",
    "register_hook", "register_post_accumulate_grad_hook", "__dlpack_device__", "resize_", "resize_as_", "_is_view",
    "is_contiguous", "dim_order", "sparse_resize_", "sparse_resize_and_clear_", "resize", "stride", "storage_offset",
    "short", "set_", "fbgemm_pack_gemm_matrix_fp16", "linalg_lstsq",
})  # fmt: skip
"""Functions whose answers differ from one process to the next (`lstsq` of tensors of rank 2: by rounding alone), or ask
for memory."""


def functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for space, some in get_overridable_functions().items():
        for function in some:
            name = getattr(function, "__name__", "")
            if name not in NOT_FOUND and name not in ("__get__", "__set__", "__delete__"):
                found[f"{getattr(space, '__name__', space)}.{name}"] = function
    return found


def played(held: list[torch.Tensor], calls: list[tuple[str, str]]) -> list[Any]:
    """For each call of two weights of 7 rows and 5 columns what it gives and what it leaves; or the sentence; or an
    error."""
    every = functions()
    answers: list[Any] = []
    start = [torch.linspace(-0.9, 0.8, 35).view(7, 5), torch.linspace(0.9, 0.1, 35).view(7, 5).square()]
    for name, call in calls:
        for p, first in zip(held, start, strict=True):
            p.data = first.clone()
        w, v = (p.detach() for p in held)
        torch.manual_seed(0)
        given = {"f": every[name], "w": w, "v": v, "o": start[1].clone(), "i": torch.tensor([1, 3])}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers.append([*found_in(eval(call, given)), *found_in([w, v])])
        except NotSupported as error:
            answers.append(str(error))
        except Exception as error:
            answers.append(error.__class__)
    return answers


def found_in(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [found for one in value for found in found_in(one)]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        full = (whole(value) if isinstance(value, DTensor) else value).detach().resolve_conj().resolve_neg()
        return [full.to(torch.complex128 if full.is_complex() else torch.float64).numpy().copy()]
    return [value] if isinstance(value, int | float | str | complex) else []


def differ(have: list[Any], want: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return a.shape == b.shape and np.allclose(a, b, atol=1e-5, equal_nan=True)
        return bool(a == b)

    return len(have) != len(want) or not all(map(same, have, want))


def tried() -> list[tuple[str, str]]:
    return [(name, call) for name in functions() for call in CALLS]


def compared(calls: list[tuple[str, str]], wanted: list[Any], answers: list[list[Any]]) -> tuple[list[str], set[str]]:
    """(what is not as in one process, names of what is refused); `answers`: of each rank."""
    apart, refused = [], set()
    for found in answers:
        for call, want, have in zip(calls, wanted, found, strict=True):
            if isinstance(have, str):
                refused.add(call[0])
            elif not isinstance(have, list) or differ(have, want):
                apart.append(f"{call}: {have} for {want}")
    return apart, refused
