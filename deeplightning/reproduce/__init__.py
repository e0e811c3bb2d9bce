"""A run that is over, made again from what it left (`again`, `compare`), and two runs told apart (`differences`).

What a run leaves stands in its folder, hence in its tracker: config, code, digest of the data, versions, metrics and
weights (`past`). Nothing is ever unpickled.
"""
