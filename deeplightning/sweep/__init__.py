"""Several runs of one command that differ in settings (`multirun`) or seeds (`seeds`), and the table of their results.

`worker` runs each in a forked process, and `frozen_code` freezes the code that all of them use. The search plug-in uses
the same modules.
"""
