"""How a run is spread over processes and devices: strategy words, precision, what the machine has."""
