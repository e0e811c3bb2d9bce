"""The report of a run, or of several side by side: one HTML file without a network, made of what run folders hold."""
