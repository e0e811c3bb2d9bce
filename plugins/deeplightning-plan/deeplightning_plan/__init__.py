"""Print what a run would start and take, and find a learning rate and a batch size: a plug-in of Deep Lightning."""
