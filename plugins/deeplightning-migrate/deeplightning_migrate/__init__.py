"""Convert configs of LightningCLI, Hydra and older systems: a plug-in of Deep Lightning."""
