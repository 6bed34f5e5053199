"""Optimal transport between posteriors: distances, geodesics, and mixtures as the misleading control."""
