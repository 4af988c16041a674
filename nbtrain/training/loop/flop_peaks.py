"""How many operations a second a card can do at most, by its name: dense, sums in 32 bits, as its maker writes.

Sources: NVIDIA's data sheets of V100, T4, A100, A10, L4, L40S, H100, H200 and B200 (where those count sparse matrices,
half of it), and the white papers on the GA102 and Ada architectures for GeForce RTX 30 and 40, whose tensor cores are
half as fast with sums in 32 bits. A card that is not here, or a part of one (MIG), has none that is known.
"""

from __future__ import annotations

import re

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
    """Operations a second; 0: not known. `kind`: one of KINDS."""
    plain = name.removeprefix("NVIDIA ")
    for pattern, rates in TERA:
        if kind in KINDS and re.fullmatch(pattern, plain):
            return rates[KINDS.index(kind)] * 1e12
    return 0.0
