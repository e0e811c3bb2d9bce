"""A YAML file becomes a typed `Config`, checked and settled. Imports no torch, Lightning or MLflow."""
