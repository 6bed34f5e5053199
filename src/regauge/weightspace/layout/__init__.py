"""Layouts, compiled from a symmetry: the tensors of a network as values of units, of pairs of units, and of the
network.
"""
