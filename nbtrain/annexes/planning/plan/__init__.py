"""What each strategy would need for it, and which one to take."""
