"""What is measured of a cell while it runs: time, operations, memory, and each step of a trial."""
