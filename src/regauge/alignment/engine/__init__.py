"""Coordinate ascent over the groups of a symmetry, for one pair of networks or many pairs at once."""
