"""The private names of other libraries, one module per library: nothing else in the project uses one.

Each function says what the name is for, since no public one does it, and what happens where a release has moved it.
`INHERITED` lists the private names that a class of ours overrides, sets or calls on itself, by the library's class.
`test_private.py` asserts every name with its behaviour, and names the one that has moved; `pyproject.toml` keeps
each library below its next minor release until those tests have passed with it (`tools/raise_bounds.sh`).
"""
