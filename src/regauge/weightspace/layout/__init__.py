"""Layouts, compiled from a symmetry: network tensors as values of units, of pairs of units, and of the network."""
