"""What training a model takes: measured on shapes, before it is trained."""
