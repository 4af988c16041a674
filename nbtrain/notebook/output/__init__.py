"""Shows what ranks print and display in the notebook."""
