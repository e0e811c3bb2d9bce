"""Write an HTML report of a run, or of several side by side, from their run folders. It needs no network."""
