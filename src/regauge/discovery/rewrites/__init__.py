"""Rewrites of parameters that leave the function unchanged and expose rotations that normalization hides."""
