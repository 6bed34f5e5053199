"""Gauges for a purpose: the point of a network's orbit that is easiest to quantize."""

from regauge.names import attach

MOVED = {
    "move_tensor": "regauge.gauging.moves",
    "rotating": "regauge.gauging.moves",
    "uncover_rotations": "regauge.gauging.moves",
    "moved_pieces": "regauge.gauging.streamed",
    "choose_streamed": "regauge.gauging.streamed",
    "default_methods": "regauge.gauging.methods.best_gauge",
    "LayerMeasures": "regauge.gauging.measures",
    "write_table": "regauge.gauging.mappings",
    "flat_rotation": "regauge.gauging.hadamard",
    "rounding_errors": "regauge.gauging.rounding",
    "mean_error": "regauge.gauging.rounding",
    "read_table": "regauge.gauging.mappings",
}
"""Names of earlier versions that no command needs any more."""

__getattr__, __dir__, __all__ = attach(__name__, __file__, moved=MOVED)
