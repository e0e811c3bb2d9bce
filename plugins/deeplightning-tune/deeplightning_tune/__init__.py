"""The verb `tune` of Deep Lightning, and the section `tune` of a config: a search over settings with Optuna."""
