"""Find out which of two settings is better, and what made a run worse: a plug-in of Deep Lightning."""
