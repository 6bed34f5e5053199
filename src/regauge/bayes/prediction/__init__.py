"""Predictions of posteriors: their loss and its Monte Carlo error, calibration, barriers, slices and collapse."""
