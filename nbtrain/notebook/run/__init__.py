"""One run of one cell: sends it, watches it, brings it home."""
