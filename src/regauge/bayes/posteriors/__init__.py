"""Posterior objects: diagonal and Kronecker-factored Gaussians, low-rank Gaussians, particles."""
