"""Reproduce a finished run (`again`), and compare runs (`differences`).

A run folder, and therefore its tracker, contains config, code, a digest of the data, versions, metrics and weights
(`past`). Nothing is unpickled.
"""
