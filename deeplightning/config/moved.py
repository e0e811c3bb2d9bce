"""Modules that have moved. A config may name a target by its former path, which means the present one."""

MOVED = {"deeplightning.engine.launch": "deeplightning.launch"}
"""The former path of a package or module, and its present path."""


def present(name: str) -> str:
    """`MODULE.NAME` by its present path; a name in no moved module is returned as it is."""
    for former, path in MOVED.items():
        if name.startswith(f"{former}."):
            return path + name.removeprefix(former)
    return name
