"""Gradients that a cell sees or makes by itself, before ranks have averaged them."""
