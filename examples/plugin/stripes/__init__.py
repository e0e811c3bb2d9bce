"""Pictures of stripes in four directions: data, a network, a config and a verb for Deep Lightning."""
