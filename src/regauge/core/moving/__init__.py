"""Random elements for the networks of a population, which are sampled together and applied in a few operations."""
