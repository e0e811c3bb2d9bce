"""Parallelism and devices: strategies, precision, the checkpoint format, and the machine's GPUs."""
