"""What ranks exchange in a cell, and what keeps them doing the same.

collectives          `reduce`, `gather`, `barrier`
collective_guard     some ranks enter a collective, others another one or none; `%%rank` cells may enter none
replica_checksums    what has to be equal on all ranks
loop_fixes           lines that would go wrong on several ranks: SyncBatchNorm, `.cuda()`; the note on BatchNorm
finished_gpu_steps   how many of a rank's steps its card has done
training_threads     two threads of a cell that train at the same time
"""
