"""What ranks write and show, into the notebook."""
