"""What models compute in, and what they keep for the backward."""
