"""Networks of different widths: transport plans in place of permutations."""
