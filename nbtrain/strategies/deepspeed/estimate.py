"""What a rank holds under `deepspeed`, and what it sends: an upper bound. `--compare` measures.

Stages 1 and 2: weights are whole on every rank, and each steps its part of them, in a copy in full precision. A bucket
is filled with gradients as they come (stage 1: when the step is taken), and added up in a copy; stage 2 keeps the
rank's part of them.

Stage 3: every rank has a part of each weight. DeepSpeed gathers ahead, a bucketful at once, and lets go of weights that
are not needed soon: in models of less than half a milliard that means after their backward. Small ones stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.kit import profile_arithmetic
from nbtrain.strategies.kit.profile_arithmetic import moments, ring, trainable
from nbtrain.strategies.memory_estimate import Estimate, Profile, Weight, World

HALF, FULL, DOUBLE = 2, 4, 8
"""Bytes of a number. What the optimizer steps is a copy in full precision; norms are taken in double."""
ADAM = ("Adam", "AdamW")
STAGE_3_DEFAULTS = {
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's own, in numbers"""

ON_DISK = "what is kept on nvme is not counted, nor are the buffers through which it comes and goes"
CUT = "what partition_activations and cpu_checkpointing save of activations is not counted"


def estimate(options: Any, profile: Profile, world: World) -> Estimate:
    """`options`: those of DeepSpeed."""
    settings, precision = config.build(options, world.precision)
    if world.ranks == 1 and world.devices == 1:
        return profile_arithmetic.estimate(profile, world)
    quantities = Quantities(settings, precision, profile, world)
    return _stage_3(quantities) if quantities.stage == 3 else _stages_1_2(quantities)


def _notes(settings: config.Settings) -> Iterator[str]:
    if "nvme" in (config.offload(settings, "offload_param"), config.offload(settings, "offload_optimizer")):
        yield ON_DISK
    section = settings.get("activation_checkpointing") or {}
    if section.get("partition_activations") or section.get("cpu_checkpointing"):
        yield CUT


class Quantities:
    """What is known of a profile and a config, in bytes."""

    def __init__(self, settings: config.Settings, precision: str, profile: Profile, world: World) -> None:
        self.settings, self.profile, self.world, self.ranks = settings, profile, world, world.ranks
        self.zero: dict[str, Any] = settings["zero_optimization"]
        self.stage: int = self.zero["stage"]
        self.low = precision in ("bf16-true", "16-true")
        self.on_cpu = world.kind == "cpu"
        self.optimizer_at = config.offload(settings, "offload_optimizer")
        self.parameters_at = config.offload(settings, "offload_param")
        trained = trainable(profile)
        self.width = max((self.bytes(weight) // max(1, weight.numel) for weight in trained), default=FULL)
        """bytes of a number, as the model computes with it, and of its gradient"""
        self.numel = sum(weight.numel for weight in trained)
        self.stepped = -(-self.numel // self.ranks) * FULL
        """bytes of what a rank steps"""
        self.share = -(-self.numel // self.ranks) * self.width
        """the same, as the model computes with it"""
        self.whole = sum(map(self.bytes, profile.weights))
        self.gradients = self.numel * self.width
        self.largest = max(map(self.bytes, trained), default=0)
        self.capacity = max(int(self.zero["reduce_bucket_size"]) * self.width, self.largest)
        """of the bucket of gradients"""
        self.state = (
            int(sum(weight.state * weight.numel * FULL / max(1, weight.bytes) for weight in trained)) // self.ranks
        )
        # What is not trained is kept in full besides, for it comes home as it was.
        self.frozen = sum(FULL * weight.numel for weight in profile.weights if not weight.trains) if self.low else 0
        scale = self.gradients / max(1, profile.gradients)
        self.course = [(m.activations, int(m.gradients * scale)) for m in moments(profile)]
        """activations, and gradients that have come"""
        self.rest = self.course[-1][0]
        """activations once the backward is over"""

    def bytes(self, weight: Weight) -> int:
        return HALF * weight.numel if self.low else weight.bytes

    def here(self, offloaded: str) -> bool:
        """What is kept there is kept where the model computes."""
        return offloaded == "none" or (offloaded == "cpu" and self.on_cpu)

    def passing(self) -> int:
        """What the optimizer's step takes on the way."""
        if self.profile.optimizer in ADAM and (self.optimizer_at != "none" or not self.on_cpu):
            return 0  # one kernel does it
        one_by_one = self.on_cpu or self.optimizer_at != "none"
        took = self.profile.step / max(1, self.profile.largest)
        return int(self.stepped * (took if one_by_one else self.profile.step_together / max(1, self.profile.gradients)))

    def bucket(self, came: int) -> int:
        """Bytes of the bucket of gradients and of the copy in which it is added up, when so many have come. Main memory
        is only taken where it is written to."""
        filled = min(came, self.capacity)
        contiguous = self.zero["contiguous_gradients"] or self.optimizer_at != "none"
        twice = 2 if self.zero.get("overlap_comm") and contiguous else 1
        return filled + twice * (filled if self.on_cpu or not contiguous or self.stage == 3 else self.capacity)

    def setting(self, name: str) -> int:
        """A setting of stage 3."""
        said: Any = self.zero.get(name)
        return int(STAGE_3_DEFAULTS[name] if said is None else said)

    def estimate(
        self, parameters: int, gradients: int, optimizer: int, buffers: int, coming: int, peaks: Iterable[int],
        host: int, sent: float,
    ) -> Estimate:  # fmt: skip
        """`coming`: gradients that come and go. `peaks`: what is there besides, for a moment."""
        activations, most = max(bytes_there for bytes_there, _ in self.course), max(peaks)
        fixed = parameters + gradients + optimizer + buffers + self.profile.buffers
        return Estimate(
            parameters=parameters + self.profile.buffers,
            gradients=gradients + coming,
            optimizer=optimizer,
            activations=activations,
            buffers=buffers + max(most - activations - coming, 0),
            kept=fixed,
            peak=fixed + most,
            sent=math.ceil(sent),
            host=host,
            notes=tuple(_notes(self.settings)),
        )


def _stages_1_2(q: Quantities) -> Estimate:
    offloaded, here = q.optimizer_at != "none", q.here(q.optimizer_at)
    own = min(q.share + 2 * q.largest, q.gradients)  # with weights at its ends that other ranks have parts of
    copies = q.stepped
    if offloaded:  # gradients of the step, its result on the way back, gradients of each weight, room for one of them
        copies += q.stepped + q.share + own + q.largest
    kept = 0 if offloaded else q.gradients if q.stage == 1 else own
    again = q.world.accumulate > 1  # gradients of the batches before are there all the time
    if q.stage == 1:  # which fills the bucket when the step is taken
        peaks = [a + (q.gradients + q.largest if again else came) + q.bucket(0) for a, came in q.course]
        peaks.append(q.rest + max(q.gradients - q.capacity, 0) + q.bucket(q.gradients))
    else:
        peaks = [
            a + (kept if again else min(max(came - q.capacity, 0), kept)) + q.bucket(came) + q.largest
            for a, came in q.course
        ]
    if not offloaded:
        peaks.append(q.rest + own + q.largest // q.width * DOUBLE)
        peaks.append(q.rest + own + q.share + (q.stepped if q.width < FULL else 0))
    if here:
        peaks.append(q.rest + (0 if offloaded else q.stepped) + q.passing())
    if q.on_cpu:  # gloo gathers weights into a copy
        peaks.append(q.rest + q.gradients)
    kept_here = q.state + copies
    return q.estimate(
        parameters=q.whole,
        gradients=q.stepped if offloaded and here else 0,
        optimizer=q.state if here else 0,
        buffers=q.frozen + (copies - (q.stepped if offloaded else 0) if here else 0) + (q.largest if offloaded else 0),
        coming=0 if offloaded else q.gradients if q.stage == 1 else q.share,
        peaks=peaks,
        host=0 if here else kept_here,
        sent=(2 * (q.world.accumulate if q.stage == 2 else 1) + 1) * ring(q.gradients, q.ranks),
    )


def _stage_3(q: Quantities) -> Estimate:
    part = sum(-(-weight.numel // q.ranks) * (q.bytes(weight) // max(1, weight.numel)) for weight in q.profile.weights)
    small = sum(map(q.bytes, (w for w in q.profile.weights if w.numel <= q.zero["stage3_param_persistence_threshold"])))
    bucket = min(int(q.zero["reduce_bucket_size"]), q.numel) * q.width if q.zero["contiguous_gradients"] else 0
    # The copy that is stepped, and gradients, which have their place from the beginning; if the step is taken in the
    # host's memory, it has a place of its own for them besides.
    copies = q.stepped * (1 if q.optimizer_at == "none" else 2)
    here = q.here(q.optimizer_at)
    host = part if q.parameters_at == "cpu" and not q.here("cpu") else 0
    if not here:
        host += q.share + (q.state + copies if q.optimizer_at == "cpu" else 0)  # nvme has the rest
    # What is used again within so many numbers is not let go of: on the way back that is, from the end, twice as
    # far as it was.
    most = min(q.setting("stage3_max_live_parameters"), q.setting("stage3_max_reuse_distance") // 2)
    live = min(q.whole, most * q.width)
    flat = min(q.whole, q.setting("stage3_prefetch_bucket_size") * q.width)
    again = live < q.whole  # weights are gathered for the backward, too

    def left(came: int) -> int:
        """Whole weights, when so much of the gradients has come."""
        rest = max(q.whole - came, 0)
        return min(live, rest) + (min(flat, rest) if again else 0)

    peaks = [q.course[0][0] + live + flat, q.rest + q.share // q.width]
    peaks += [a + left(came) + q.largest + q.bucket(came) - min(bucket, q.bucket(came) // 2) for a, came in q.course]
    if here:
        peaks.append(q.rest + q.passing() + (q.stepped if q.optimizer_at == "none" else 0))
        peaks.append(q.rest + (q.stepped + q.share if q.width < FULL else 0))
    return q.estimate(
        parameters=part if q.here(q.parameters_at) else 0,
        gradients=q.share if here else 0,
        optimizer=q.state if here else 0,
        buffers=q.frozen // q.ranks + small + bucket + (copies if here else 0),
        coming=0,
        peaks=peaks,
        host=host,
        sent=q.world.accumulate * ((1 + again) * ring(q.whole, q.ranks) + ring(q.gradients, q.ranks)),
    )
