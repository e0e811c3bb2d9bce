"""`deeplightning tune`: a search over settings. Trials are drawn by Optuna and run as `deeplightning train` runs.

`search` is the loop, `study` what it remembers, `worker` how a trial runs, `parent` the run above all trials, `outcome`
what is shown and written at the end. Optuna is imported in `study` alone.
"""
