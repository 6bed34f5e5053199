"""Networks that represent signals: implicit neural representations (INRs) of images and 3D shapes.

References:
    Ballerini (2023), Alignment of implicit neural representations of 3D shapes via permutation symmetries.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={"EmbeddingTraining": "regauge.inr:EmbeddingConfig", "Fit": "regauge.inr:FitConfig"}
    | {"labels_of": "regauge.inr.fields.signal_samples"}
    | dict.fromkeys(("read_inr", "save_inr"), "regauge.inr.representation"),
)
