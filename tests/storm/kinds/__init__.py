"""One module per kind of case; `storm` has what each must have."""
