"""Orbits: copies of a network that compute the same, and how they are found again."""
