"""What lies between two networks: lines in weight space and the barriers on them."""

from regauge.connect.batchnorm import reset_batchnorm
from regauge.connect.line import Curve, interpolate, line

__all__ = ["Curve", "interpolate", "line", "reset_batchnorm"]
