"""What the user is told of a run: what it did, what failed and why, what to write instead."""
