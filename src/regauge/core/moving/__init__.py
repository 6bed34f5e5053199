"""Random elements for the networks of a population, sampled together and applied in a few operations."""
