"""How a run is spread over processes and devices: strategies, precision, checkpoint format, the machine's devices."""
