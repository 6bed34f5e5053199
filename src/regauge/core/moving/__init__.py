"""Random elements for all networks of a population, which are sampled and applied in a few operations."""
