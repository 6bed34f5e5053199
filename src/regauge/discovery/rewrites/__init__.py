"""Rewrites that set gains to one without a change of the function. After such a rewrite, rotations are possible."""
