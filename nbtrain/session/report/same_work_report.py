"""Compares what the ranks of a cell did: the same work, or work on different data."""

from __future__ import annotations

from collections.abc import Iterable

from nbtrain.events import Finished

SAME_WORK = (
    "all {count} ranks computed the same gradients, so they did the work of one (the numbers are right). Give each its "
    "own samples: a DataLoader, which is shared out by itself; X[rank::world_size] of a whole data set; a Generator "
    "with manual_seed(seed + rank)"
)
OTHER_DATA = (
    "the data set of a loader is not the same on all ranks, and its batches were shared out all the same: if the cell "
    "has split it by rank, each rank has seen 1/{count} of its part. Leave the split out, or write --no-sampler"
)
OTHER_DIVISORS = (
    "each rank divides its loss by a number of its own (ignored targets, class weights, a mask, a mean of its losses), "
    "and gradients are averaged over the ranks, where one process divides all by one number. Bring that together: "
    'loss = total * world_size / reduce(count, "sum"), where total is the sum over this rank\'s samples and count what '
    "they count, (y != -100).sum() or weight[y].sum(); reduce(mean) for a mean"
)

OWN_GRADIENTS = (
    "torch.autograd.grad gives each rank the gradients of its own share of a batch. They are averaged where they are "
    "put into p.grad; what else is made of them (fast weights, a penalty, a norm) is of that share, and not what one "
    "process has. Write grads = [reduce(g) for g in grads], which can be differentiated again, unless each rank works "
    "on tasks of its own"
)


def compared(finished: Iterable[Finished]) -> dict[str, str]:
    """name → sentence to say"""
    ended = [done.compared for done in finished]
    count = len(ended)
    if count < 2:
        return {}
    found = {}
    work = {numbers.get("work") for numbers in ended}
    if len(work) == 1 and None not in work:
        found["work"] = SAME_WORK.format(count=count)
    data = {numbers["data"] for numbers in ended if "data" in numbers}
    if len(data) > 1:
        found["data"] = OTHER_DATA.format(count=count)
    everywhere = set.intersection(*(set(numbers) for numbers in ended))
    differ = {name for name in everywhere if len({numbers[name] for numbers in ended}) > 1}
    if any(f"{name} for each" in differ for name in differ):
        found["divisors"] = OTHER_DIVISORS
    if len({numbers["asked"] for numbers in ended if "asked" in numbers}) > 1:
        found["own gradients"] = OWN_GRADIENTS
    return found
