"""What `MODULE.CLASS` takes, gives and logs, read from source text: nothing of the target is imported."""
