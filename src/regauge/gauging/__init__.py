"""Choice of a network's gauge: for example, the equivalent weights that are easiest to quantize."""

from regauge.names import attach

MOVED = {
    "moves": ("move_tensor", "rotating", "uncover_rotations"),
    "rounding": ("mean_error", "rounding_errors"),
    "mappings": ("read_table", "write_table"),
    "choose_streamed": ("choose_streamed", "moved_pieces"),
    "measures": ("LayerMeasures",),
    "methods.best_gauge": ("default_methods",),
    "result": ("Trials",),
    "hadamard": ("flat_rotation",),
}
"""Names that only earlier versions exported, each with the file that defines the name."""

moved = {name: f"regauge.gauging.{file}" for file, names in MOVED.items() for name in names}
__getattr__, __dir__, __all__ = attach(__name__, __file__, moved=moved)
