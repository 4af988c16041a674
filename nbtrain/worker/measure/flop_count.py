"""Counts the floating-point operations of a cell: of two steps, early, and then multiplied.

Two forwards with their backwards are counted as torch runs them (two: a GAN's are different); from then on each
backward of the cell stands for as many. So evaluations are not counted, and sequences of varying length only as the
first ones were. Counting changes no number that is computed; it makes these two steps slower. It is left out where it
would disturb: with compiled code, inside of somebody else's mode, under a strategy that computes in threads.

What a card can do at most is known by its name: dense operations a second, sums in 32 bits, as its maker writes.
Sources: NVIDIA's data sheets of V100, T4, A100, A10, L4, L40S, H100, H200 and B200 (where those count sparse matrices,
half of it), and the white papers on the GA102 and Ada architectures for GeForce RTX 30 and 40, whose tensor cores are
half as fast with sums in 32 bits. A card that is not here, or a part of one (MIG), has none that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from nbtrain.compat import compiler, fake_tensors
from nbtrain.worker.measure.phases import BACKWARD, FORWARD, UNDECIDED, PhaseTimer

FIRST, PAIRS = 2, 2
"""backwards that are let pass before, and that are counted"""
TRIES = 12
"""forwards that are looked at: an evaluation may come between, which no backward follows, and is not to be slower"""


class CountingMode(fake_tensors.DispatchMode):
    """Counts each operation as it runs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[torch.dtype, int] = {}
        self.uncounted = False
        """an operation ran whose cost is not known"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = fake_tensors.packet_of(func)
        if packet in KNOWN:
            try:
                count = KNOWN[packet](*args, **kwargs, out_val=out)
                dtype = next(a.dtype for a in args if isinstance(a, torch.Tensor))
                self.counts[dtype] = self.counts.get(dtype, 0) + count
            except Exception:  # a form of the call that torch's formula does not know
                self.uncounted = True
        elif packet in UNKNOWN:
            self.uncounted = True
        return out


class FlopCount:
    """Counts a cell's operations on a rank. `begin` and `end` around a cell."""

    def __init__(self, phases: PhaseTimer, device: torch.device, allowed: bool) -> None:
        self._phases = phases
        self._device = device
        self._allowed = allowed and device.type in ("cpu", "cuda")
        self._mode: CountingMode | None = None
        self._inside = False
        """a backward has begun since the mode was entered"""
        self._counts: dict[torch.dtype, int] = {}
        self._pairs = self._tries = 0
        self._each = 0.0
        """operations of a forward and its backward"""
        self.fastest = 0.0

    @property
    def total(self) -> float:
        """Operations since the cell began, as far as known; from any thread."""
        return self._each * self._phases.backwards

    def begin(self) -> None:
        self._counts, self._each, self.fastest = {}, 0.0, 0.0
        self._pairs = self._tries = 0
        self._phases.on_phase = self._phase_begins if self._allowed else None

    def end(self) -> None:
        self._leave()
        self._phases.on_phase = None

    def _phase_begins(self, phase: int) -> None:
        """Begin or end counting, at the beginning of each phase."""
        if phase == BACKWARD:
            self._inside = True
            return
        mode = self._mode
        if mode is not None:
            if not self._leave():  # the user's own mode was begun since, and is still there
                self._counts, self._pairs = {}, PAIRS
                return
            if self._inside and phase == UNDECIDED:
                self._add(mode)
        if self._pairs >= PAIRS:
            self._phases.on_phase = None
        elif phase in (FORWARD, UNDECIDED) and self._phases.backwards >= FIRST and torch.is_grad_enabled():
            self._tries += 1
            if self._tries > TRIES or disturbs():
                self._phases.on_phase = None
            else:
                self._inside, self._mode = False, CountingMode()
                self._mode.__enter__()

    def _add(self, mode: CountingMode) -> None:
        for dtype, count in mode.counts.items():
            self._counts[dtype] = self._counts.get(dtype, 0) + count
        self._pairs = PAIRS + 1 if mode.uncounted else self._pairs + 1
        total = sum(self._counts.values())
        if self._pairs == PAIRS and total:
            self.fastest = _fastest(self._counts, self._device)
            self._each = total / PAIRS

    def _leave(self) -> bool:
        """Whether the mode is off. It waits for the end of the user's own mode, or `inference_mode`, that was begun
        after it: torch puts back there what it found at its beginning, and would call a mode that is no more."""
        if self._mode is not None:
            if fake_tensors.current_mode() is not self._mode or torch.is_inference_mode_enabled():
                return False
            self._mode.__exit__(None, None, None)
            self._mode = None
        return True


def disturbs() -> bool:
    """Whether a mode would disturb other code."""
    if fake_tensors.dispatch_modes():
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return compiler.has_compiled()  # what was compiled would be compiled anew


def _fastest(counts: dict[torch.dtype, int], device: torch.device) -> float:
    """The most operations a second for this mixture of precisions."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    peaks = {dtype: peak(name, _kind(dtype)) for dtype in counts}
    if not all(peaks.values()):
        return 0.0
    return sum(counts.values()) / sum(count / peaks[dtype] for dtype, count in counts.items())


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "")


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


KNOWN: dict[Any, Callable[..., int]] = dict(flop_registry)
KNOWN |= dict.fromkeys(fake_tensors.attention_on_cpu(backward=False), _attention)
KNOWN |= dict.fromkeys(fake_tensors.attention_on_cpu(backward=True), _attention_backward)
UNKNOWN = fake_tensors.whole_networks()


KINDS = ("fp32", "tf32", "bf16", "fp16")
"""tf32: numbers of 32 bits multiplied on tensor cores"""

TERA: tuple[tuple[str, tuple[float, float, float, float]], ...] = (
    # name as the driver says it                          fp32  tf32   bf16   fp16
    (r"Tesla V100S-PCIE-\d+GB",                           (16.4, 0.0, 0.0, 130.0)),
    (r"Tesla V100-PCIE-\d+GB",                            (14.0, 0.0, 0.0, 112.0)),
    (r"Tesla V100-(SXM2|SXM3)-\d+GB(-LS)?",               (15.7, 0.0, 0.0, 125.0)),
    (r"Tesla T4",                                         (8.1, 0.0, 0.0, 65.0)),
    (r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe",            (19.5, 156.0, 312.0, 312.0)),
    (r"A10",                                              (31.2, 62.5, 125.0, 125.0)),
    (r"L4",                                               (30.3, 60.0, 121.0, 121.0)),
    (r"L40S",                                             (91.6, 183.0, 362.0, 362.0)),
    (r"H100 80GB HBM3",                                   (67.0, 494.5, 989.5, 989.5)),
    (r"H100 PCIe",                                        (51.0, 378.0, 756.0, 756.0)),
    (r"H100 NVL",                                         (60.0, 417.5, 835.5, 835.5)),
    (r"H200",                                             (67.0, 494.5, 989.5, 989.5)),
    (r"H200 NVL",                                         (60.0, 417.5, 835.5, 835.5)),
    (r"B200",                                             (75.0, 1125.0, 2250.0, 2250.0)),
    (r"GeForce RTX 3070",                                 (20.3, 20.3, 40.6, 40.6)),
    (r"GeForce RTX 3080",                                 (29.8, 29.8, 59.5, 59.5)),
    (r"GeForce RTX 3090",                                 (35.6, 35.6, 71.0, 71.0)),
    (r"GeForce RTX 3090 Ti",                              (40.0, 40.0, 80.0, 80.0)),
    (r"GeForce RTX 4070 Ti",                              (40.1, 40.1, 80.2, 80.2)),
    (r"GeForce RTX 4080",                                 (48.7, 48.7, 97.5, 97.5)),
    (r"GeForce RTX 4090",                                 (82.6, 82.6, 165.2, 165.2)),
)  # fmt: skip


def peak(name: str, kind: str) -> float:
    """The most operations a second of this card; 0: not known. `kind`: one of KINDS."""
    plain = name.removeprefix("NVIDIA ")
    for pattern, rates in TERA:
        if kind in KINDS and re.fullmatch(pattern, plain):
            return rates[KINDS.index(kind)] * 1e12
    return 0.0
