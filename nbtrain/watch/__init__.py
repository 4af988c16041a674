"""What is known of a run while it goes on, and afterwards: kept in bounded memory, shown by the views."""
