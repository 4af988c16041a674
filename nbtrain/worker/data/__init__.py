"""Batches and loaders on a rank: who gets which, and where a loop stands in them.

loaders            `iter(loader)` and `len(loader)`, as a loop calls them
batch_dealing      which rank gets which batch; of iterable data sets, stream_dealing; for predictions, whole_batches
evaluations        loops that see every batch; loop_code: how they are told from loops that train
loop_position      where `resumable` loops stand
split_datasets     data that the cell has split by itself; torchmetrics_sync: metrics of samples that all have seen
"""
