"""A search over settings: Optuna draws trials, each trial is a run.

`search` is the loop, `study` what it remembers, `worker` how a trial runs, `parent` the run above all trials, `outcome`
what is shown and written at the end. Optuna is imported in `study` alone.
"""
