"""Gauges for a purpose: the point of a network's orbit that is easiest to quantize."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(("rotating", "uncover_rotations"), "regauge.gauging.moves")
    | {
        "Trials": "regauge.gauging.result",
        "flat_rotation": "regauge.gauging.hadamard",
        "mean_error": "regauge.gauging.rounding",
    },
)
