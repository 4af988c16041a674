"""How a loop grows with the number of ranks."""
