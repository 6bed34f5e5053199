"""Costs computed from the activations of networks: statistics that are accumulated batch by batch."""
