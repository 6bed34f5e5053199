"""Optimal transport between posteriors: distances, geodesics, and mixtures as a misleading control."""
