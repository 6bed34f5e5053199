"""Layouts, which assign the entries of tensors to units, to pairs of units, or to the network."""
