"""What counts and watches the steps of a training loop on a rank."""
