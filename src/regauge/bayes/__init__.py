"""Posteriors over the weights of networks, aligned as distributions."""
