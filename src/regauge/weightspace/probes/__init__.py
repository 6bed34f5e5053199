"""Learned inputs (probes) on which networks are evaluated.

Activations at the probes become features of units, and outputs become features of the network.

`readings` finds which intermediate values belong to which unit sets, and `probed` evaluates networks. `probes` contains
the learned inputs, and `output_reader` reads the outputs of networks at probes.
"""
