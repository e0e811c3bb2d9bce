"""Access to private names of other libraries, one module per library. Nothing else in the project uses private names.

Each docstring states what the name is needed for, as no public name does it, and what happens if a release moves it.
`INHERITED` lists the private names that a subclass of ours overrides, sets or calls, by the library's class.
`test_private.py` asserts the behaviour of every name, and reports a name that moved. `pyproject.toml` keeps each
library below its next minor release until these tests pass with it (`tools/raise_bounds.sh`).
"""
