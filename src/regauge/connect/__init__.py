"""Paths between networks and the barriers on them, planes, and repair of interpolated networks."""

from regauge.connect.line import Curve, line
from regauge.connect.paths import (
    Bezier,
    ControlledPath,
    Geodesic,
    Path,
    PolygonalChain,
    PreparedPath,
    Repaired,
    Straight,
    WassersteinGeodesic,
)
from regauge.connect.plane import Plane, plane
from regauge.connect.repair import LayerVariance, VarianceCollapse, repair, reset_batchnorm, variance_collapse
from regauge.connect.straighten import FlatLine, Straighten, straighten, train_path
from regauge.core.interpolation import combine, interpolate

__all__ = [
    "Bezier",
    "ControlledPath",
    "Curve",
    "FlatLine",
    "Geodesic",
    "LayerVariance",
    "Path",
    "Plane",
    "PolygonalChain",
    "PreparedPath",
    "Repaired",
    "Straight",
    "Straighten",
    "VarianceCollapse",
    "WassersteinGeodesic",
    "combine",
    "interpolate",
    "line",
    "plane",
    "repair",
    "reset_batchnorm",
    "straighten",
    "train_path",
    "variance_collapse",
]
