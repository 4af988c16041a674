"""Batches and loaders on a rank: who gets which, and where a loop stands in them."""
