"""The widget for choosing a strategy."""
