"""A run from its first stage to its last, and the use of a finished run."""
