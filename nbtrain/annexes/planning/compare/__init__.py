"""What came of running one cell in several ways."""
