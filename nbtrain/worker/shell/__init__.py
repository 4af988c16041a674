"""Where a rank runs cells, and what it says meanwhile."""
