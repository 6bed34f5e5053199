"""Rewrites that set gains to one without a change of the function, which makes rotations possible."""
