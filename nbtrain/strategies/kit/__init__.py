"""What several strategies share."""
