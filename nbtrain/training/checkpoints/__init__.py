"""Checkpoints: what is trained, in a folder, from which any strategy on any number of ranks goes on.

content             what belongs to models, optimizers and schedulers, under names that mean the same on every rank
rank_parts          which rank writes what of it
sharded_format      for going on: torch.distributed.checkpoint, every tensor flat
full_format         for giving away: safetensors
other_formats       what DeepSpeed, torch and Lightning have written
find_source         which of these a path is; and it is opened, by all ranks together
folder              whole folders only: written beside their place, then moved there
ownership           whose checkpoints a folder has
background_write    the thread that writes while the training goes on
matches_objects     whether a checkpoint is of this model
restore             a checkpoint's content into objects
rollback            what was there before, put back exactly
schedule            when `--save-every` is due
disk_full           says that a disk is full, where torch does not
torch_save          `torch.save` on several ranks
uninterrupted       what is not interrupted in its middle
save_and_load       save and load, on a rank
live_weights        the weights of a run in the background, for the notebook
api                 save and load, wherever they are called; `resumable`
"""
