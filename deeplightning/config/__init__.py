"""Turn a YAML file into a typed `Config`, checked and resolved. Imports no torch, Lightning or MLflow."""
