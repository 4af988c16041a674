"""`nbtrain.predict(model, loader, devices=4)`: what a model says of a data set, computed by all ranks, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbtrain.annexes.frameworks.functions.arguments import line_of
from nbtrain.annexes.frameworks.functions.predicted_rows import Ragged, SampleOrder, as_array, as_frame, whole
from nbtrain.annexes.frameworks.functions.prediction_loop import PredictionLoop
from nbtrain.annexes.frameworks.functions.prediction_step import PredictionStep
from nbtrain.annexes.frameworks.functions.predictions import Predictions, as_sequence
from nbtrain.annexes.frameworks.functions.run import call
from nbtrain.annexes.frameworks.functions.run_cell import errors_in_short, script_here
from nbtrain.base.errors import UsageError

FORMS = ("tensor", "numpy", "pandas", "batches")


@errors_in_short()
def predict(
    model: Any,
    data: Any,
    step: Callable[[Any, Any], Any] | None = None,
    *,
    strategy: Any = "auto",
    devices: Any = "auto",
    accelerator: Any = "auto",
    precision: Any = None,
    to: str = "tensor",
    batch_size: int = 32,
) -> Any:
    """What the model gives for each sample of a loader or data set: one row for each, in the data set's order.

    Also where the loader shuffles. Of a stream, and of a sampler that draws samples more than once, it is the order
    that one process sees.

    Whole batches are dealt out to the ranks, so that each is what one process computes. `step(model, batch)` says how a
    batch is computed; without it, it is `predict_step` where the model has one, else the model is given a dict by its
    names, and of a tuple as many parts as `forward` takes; of a dict that it gives, what has a row for each sample is
    kept. `to`: "tensor", "numpy", "pandas" (a Series or a DataFrame),
    "batches" (a list, as the loader has them, in its order). What is more than 2 GB stays on disk, in batches.
    """
    if to not in FORMS:
        raise UsageError(f"to={to!r}: {', '.join(map(repr, FORMS))}")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"predict takes a model (torch.nn.Module), not {type(model).__name__}, so that it is in eval mode and set "
            "up on the ranks. What is computed with it stands behind the loader: "
            "nbtrain.predict(model, loader, lambda model, batch: …)"
        )
    has_rows = hasattr(data, "__getitem__") and hasattr(data, "__len__")  # as a data set of Hugging Face's
    if isinstance(data, Dataset) or (has_rows and not isinstance(data, DataLoader | torch.Tensor | Mapping | str)):
        data = DataLoader(data, batch_size)
    if not isinstance(data, DataLoader):
        raise UsageError(f"predict takes a DataLoader or a Dataset, not {type(data).__name__}")
    loop = PredictionLoop(PredictionStep(step, as_rows=to != "batches"))
    call(*line_of(strategy, devices, accelerator, precision), loop, (model, data), what="nbtrain.predict")
    script, predicted = script_here(), (loop.items, loop.samples)
    items, samples = predicted if script is None else script.of_rank_0(predicted)
    batches = as_sequence(items)
    if to == "batches":
        return batches
    if isinstance(batches, Predictions):
        if SampleOrder(samples).place is not None:
            print("nbtrain: the predictions are on disk, in batches and in the order of the loader, which shuffles")
        return batches
    try:
        predicted, in_order = whole(batches, samples)
    except Ragged as why:
        print(f"nbtrain: {why}, so that they are returned in batches, as the loader has them")
        return batches
    if not in_order:
        print(
            "nbtrain: the loader shuffles, and a prediction has other than one row for each sample: such rows are in "
            "the loader's order"
        )
    return predicted if to == "tensor" else as_array(predicted) if to == "numpy" else as_frame(predicted)
