"""A cell that is tried: what is measured or compared, and that nothing of it comes home."""
