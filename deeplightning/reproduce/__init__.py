"""Reproduce a finished run (`again`) and compare the results (`result_diff`), or show the differences of two runs.

A run folder, and therefore its tracker, contains config, code, a digest of the data, versions, metrics and weights
(`past`). Nothing is unpickled.
"""
