"""nbtrain beside the other ways to several processes from a notebook: the same work on each, in turns, in one run."""
