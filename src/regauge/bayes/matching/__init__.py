"""Posteriors moved along their orbits: one to another, many into one universe, many merged into one Gaussian."""
