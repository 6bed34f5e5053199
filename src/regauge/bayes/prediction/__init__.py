"""Predictions of posteriors: their loss with its Monte Carlo error, calibration, barriers, slices, collapse."""
