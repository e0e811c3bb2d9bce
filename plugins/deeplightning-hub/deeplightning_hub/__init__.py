"""Publish runs on Hugging Face and in MLflow's model registry: a plug-in of Deep Lightning."""
