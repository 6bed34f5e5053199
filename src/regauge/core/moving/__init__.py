"""Random elements that move the networks of a population: drawn together, and applied in a few operations."""
