"""A YAML file becomes a typed `Config`, whose values know their places. Imports no torch, Lightning or MLflow."""
