"""Predictions of posteriors: loss and its Monte Carlo error, calibration, barriers, planes, collapse of variances."""
