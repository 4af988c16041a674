"""What a cell can do without, loaded when one of its verbs, options or names is used.

planning/    what a model needs under each strategy: `%distributed plan`, `pick`, `--compare`
export/      a cell as a script for torchrun: `%distributed export`
machines/    ssh, SLURM, Ray, Kubernetes: `--engine ssh`, `%distributed join --slurm`
detached/    runs that outlive the notebook: `--detach`, `%distributed runs`, `attach`
batch_file.py what files for `sbatch` have in common
frameworks/  functions on ranks (`nbtrain.run`, `predict`), Lightning's Trainer
"""
