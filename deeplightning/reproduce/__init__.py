"""A finished run is made again from what it kept (`again`, `compare`), and two runs are compared (`differences`).

What a run leaves stands in its folder, hence in its tracker: config, code, digest of the data, versions, metrics and
weights (`past`). Nothing is ever unpickled.
"""
