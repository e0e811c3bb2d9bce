"""A run from its first step to its last, and what a finished run gives back."""
