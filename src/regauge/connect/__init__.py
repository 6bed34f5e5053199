"""What lies between networks: paths and the barriers on them, planes, and repair of interpolated networks."""

from regauge.connect.batchnorm import reset_batchnorm
from regauge.connect.line import Curve, line
from regauge.connect.paths import (
    Bezier,
    ControlledPath,
    Geodesic,
    Path,
    PolygonalChain,
    Straight,
    WassersteinGeodesic,
)
from regauge.connect.points import combine, interpolate
from regauge.connect.train_path import train_path

__all__ = [
    "Bezier",
    "ControlledPath",
    "Curve",
    "Geodesic",
    "Path",
    "PolygonalChain",
    "Straight",
    "WassersteinGeodesic",
    "combine",
    "interpolate",
    "line",
    "reset_batchnorm",
    "train_path",
]
