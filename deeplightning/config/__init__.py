"""A YAML file becomes a typed `Config`, checked against schema, signatures, rules and machine; its values know their
places. Imports no torch, Lightning or MLflow."""
