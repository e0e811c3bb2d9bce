"""The processes of a run: streams, identity, rendezvous, supervision. Imports no torch."""
