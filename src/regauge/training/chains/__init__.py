"""Chains of layers, forward and backward written by hand: no graph is kept, and memory is used again.

`steps` reads a module as a chain, `vectors` runs fully connected networks as one program for a whole stack, and
`images` runs convolutional ones.
"""
