"""The graph of objects that notebook and ranks share."""
