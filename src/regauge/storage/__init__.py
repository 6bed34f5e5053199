"""Populations (many networks of one architecture) in files: stores, loaders of batches, and architectures."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(("Alignment", "adapter_symmetry", "load_alignment"), "regauge.checkpoints")
    | {"save_alignment": "regauge.checkpoints:Alignment.save"},
)
