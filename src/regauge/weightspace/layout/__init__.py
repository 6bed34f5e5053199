"""Layouts, compiled from a symmetry: entries of tensors as values of units, of pairs of units, and of the network."""
