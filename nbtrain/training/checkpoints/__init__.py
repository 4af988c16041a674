"""Checkpoints: what is trained, in a folder, from which any strategy on any number of ranks goes on.

    content     what belongs to models, optimizers and schedulers, under names that mean the same on every rank
    parts       which rank writes what of it
    sharded     the format for going on: torch.distributed.checkpoint, every tensor flat
    full        the format for giving away: safetensors
    foreign     what DeepSpeed has written elsewhere
    sources     which of these a path is
    folder      whole folders only: written beside their place, then moved there
    owning      whose checkpoints a folder has
    writing     the thread that writes while the training goes on
    comparing   whether a checkpoint is of this model
    restoring   a checkpoint's content into objects
    position    where loops and loaders stand
    opening     a path, opened by all ranks together
    every       when `--save-every` is due
    unbroken    what is not interrupted in its middle
    core        save and load, on a rank
    here        save and load, wherever they are called

None of them imports one that is named further down.
"""
