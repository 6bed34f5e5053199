"""The tensors of a network as features of units, of pairs of units, and of the network: compiled from its symmetry."""
