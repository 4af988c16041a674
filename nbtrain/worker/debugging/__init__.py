"""The debugger of a rank: `breakpoint()` in a cell, and the frames of a cell that failed."""
