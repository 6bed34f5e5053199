"""Paths between networks and the barriers on them, planes, and repair of interpolated networks."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={"Straighten": "regauge.connect:StraightenConfig"}
    | {"ControlledPath": "regauge.connect.paths"}
    | {"LayerVariance": "regauge.connect.repair"},
)
