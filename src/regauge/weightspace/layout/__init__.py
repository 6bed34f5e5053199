"""Layouts, compiled from a symmetry: entries of tensors become values of units, pairs of units, or the network."""
