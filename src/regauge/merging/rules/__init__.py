"""Rules that make one tensor of the result from the same tensor of all networks: one rule a file, by its name."""
