"""Says once that transformers' Trainer is about to use `DataParallel`, as it does in a notebook that sees several GPUs.

The batch is then another one than `per_device_train_batch_size` says, and one process feeds all cards: people find out
by "Expected all tensors to be on the same device", or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.compat import training_libraries
from nbtrain.compat.intercept import Listeners

WORD = (
    "nbtrain: this Trainer sees {count} GPUs and no ranks, so it trains by DataParallel: one process, batches of "
    "{count} × per_device_train_batch_size. On a rank for each GPU: "
    "nbtrain.run(train, strategy='none', devices={count}), where train() makes the Trainer; on one GPU: "
    "CUDA_VISIBLE_DEVICES=0 before torch is imported"
)


def watch_transformers_trainer() -> Callable[[], None]:
    """Listen in this process, once transformers is imported. Returns what ends it."""
    said = False

    def make(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def listen(old: Callable[..., Any]) -> Callable[..., Any]:
            def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal said
                count = getattr(trainer.args, "n_gpu", 1)
                if count > 1 and not said:
                    said = True
                    print(WORD.format(count=count), flush=True)
                return old(trainer, *args, **kwargs)

            return train

        return listen

    on = Listeners()
    on.when_imported(training_libraries.TRAINER, [f"{training_libraries.TRAINER}.Trainer.train"], "brought", make)
    return on.close
