"""Rewrites of parameters that leave the function unchanged and expose what normalization hides."""
