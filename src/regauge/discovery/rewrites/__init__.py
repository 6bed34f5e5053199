"""Rewrites that set gains to one and leave the function unchanged. Gains of one make rotations possible."""
