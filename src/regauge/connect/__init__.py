"""Paths between networks and their loss barriers, planes through networks, and repair of interpolated networks."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(("LayerVariance", "VarianceCollapse"), "regauge.connect.repair")
    | {
        "ControlledPath": "regauge.connect.paths",
        "FlatLine": "regauge.connect.straighten",
        "Straighten": "regauge.connect:StraightenConfig",
    },
)
