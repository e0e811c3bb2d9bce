"""A bundle answers HTTP. Nothing here imports torch, Lightning or MLflow; of ours, `image` and `runfolder` only."""
