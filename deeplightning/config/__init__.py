"""Text becomes a checked `Config`. Nothing here imports torch, Lightning or MLflow."""
