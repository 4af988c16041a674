"""Makes parcels of notebook objects and back: what a cell needs goes to the ranks, what it changed comes home.

    names/               finds which names of the notebook a cell reads and binds, without running anything
    graph/               the graph of objects: the table of twins, finding what changed, editing in place
    kinds/               how each kind of object is looked at, made and edited in place; checksums of content
    parcel.py            makes bytes of what travels: one pickle, and large buffers in shared memory beside it
    shared_memory.py     memory that other processes open by its path
    python_module_baseline.py
                         what files of local modules made, and what became of it
    local_files.py       which modules are local, and when their files are executed
    gc_paused.py         no garbage collection while many objects are made
    travel_check.py      what cannot travel, named: its path, its line in the notebook (cell_lines.py), the remedy

Nothing here imports IPython: a namespace is handed in. Importing these modules imports neither torch nor NumPy:
functions that handle their objects do, when the notebook has them.
"""
