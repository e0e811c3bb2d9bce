"""One module per kind of case; `storm/__init__.py` documents what each defines."""
