"""Predictions of posteriors: loss with its Monte Carlo error, calibration, barriers, planes, and variance collapse."""
