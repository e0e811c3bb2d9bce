"""The processes of a run: streams, identity, rendezvous, supervision. Importing it loads no torch."""
