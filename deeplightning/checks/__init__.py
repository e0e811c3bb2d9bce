"""All judgement of a config: keys, signatures, combinations, the machine, and whether its source is trusted."""
