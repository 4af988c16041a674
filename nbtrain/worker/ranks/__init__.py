"""What ranks exchange in a cell, and what keeps them doing the same."""
