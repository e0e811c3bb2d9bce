"""One file per loss, each a plain nn.Module with plain keyword arguments."""
