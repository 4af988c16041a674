"""Checkpoints: what is trained, in a folder, from which any strategy on any number of ranks goes on.

api                 save and load, wherever they are called; `resumable`
checkpoints_of_cell the objects of a cell, and when one is due
save_and_load       save and load on a rank, all ranks together
content             what belongs to models, optimizers and schedulers, under names that mean the same on every rank;
                    which rank writes what of it
tensor_files        safetensors: for going on, what each rank keeps, flat; for giving away, whole
background_write    the thread that writes while the training goes on
folder              whole folders only: written beside their place, then moved there; whose they are
open_checkpoint     which kind of checkpoint a path is, and what reads it
restore             whether a checkpoint is of these objects, and its content into them
schedule            when `--save-every` is due
torch_save          `torch.save` on several ranks
safe_load           what `torch.save` has written, without running code of whoever wrote it
elastic_place       where an elastic run goes on; newest: the newest checkpoint of a run
live_weights        the weights of a run in the background, for the notebook
"""
