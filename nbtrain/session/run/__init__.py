"""One run of one cell: sent, watched, and brought home."""
