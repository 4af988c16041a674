"""What the notebook and the ranks hold of each other."""
