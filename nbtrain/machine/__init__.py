"""Finds what this machine has, and what of it the ranks get.

devices.py                `--devices`: a device for each rank; which are free (`auto`, `free:2`); `OMP_NUM_THREADS`
gpus.py                   GPUs, and which processes compute on them (NVML); TPUs
host.py                   cores and memory that this process may use (cgroups); Colab, Kaggle
leases.py                 two notebooks of a user do not take the same card
registry.py               strategies, engines and views by name
fork_safety.py            why `--start fork` is refused
data_parallel_warning.py  said of transformers' Trainer on several cards
"""
