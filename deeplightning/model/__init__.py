"""Networks, one file each: plain nn.Modules with plain keyword arguments."""
