"""Posteriors as values: diagonal and Kronecker-factored Gaussians, low-rank Gaussians, particles."""
