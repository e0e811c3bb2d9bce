"""What happens during a run beside learning: checkpoints, resume, logs, summaries."""
