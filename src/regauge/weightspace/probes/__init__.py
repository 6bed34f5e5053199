"""Learned inputs on which networks are evaluated. Activations become unit features, outputs network features.

`readings` finds which intermediate values belong to which unit sets, and `probed` evaluates networks. `probes` contains
the learned inputs, and `output_reader` reads the outputs of networks at probes.
"""
