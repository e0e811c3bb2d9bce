"""A finished run is made again (`again`, `compare`); two are compared (`differences`), or mixed (`bisect`).

What a run leaves stands in its folder, hence in its tracker: config, code, digest of the data, versions, metrics and
weights (`past`). Nothing is ever unpickled.
"""
