"""Learned inputs on which networks are run: activations become features of units, outputs features of networks.

`readings` finds which intermediate values belong to which sets of units, `probed` runs networks, `probes` learns, and
`output_reader` reads the outputs of networks at probes.
"""
