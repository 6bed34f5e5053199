"""Learned inputs that networks are run on: their activations become features of units, their outputs of networks.

`readings` finds which intermediate values belong to which sets of units, `probed` runs networks, `probes` learns, and
`outputs` reads what networks compute at them.
"""
