"""One file per network, each a plain nn.Module with plain keyword arguments."""
