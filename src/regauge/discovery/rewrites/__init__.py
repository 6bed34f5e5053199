"""Rewrites of parameters that leave the function unchanged and reveal rotations that normalization hides."""
