"""Optimal transport between posteriors: distances and geodesics, and mixtures as a control."""
