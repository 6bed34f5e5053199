"""The symmetries of neural network weights: found in PyTorch models, checked numerically, and used."""

from regauge.names import VERSION, attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(("BestOf", "DataMatching", "JointMatching", "MergeMany", "MixedMatching"), "regauge.alignment")
    | dict.fromkeys(("BestGauge", "Chain", "LearnedRotation", "RandomRotation", "Smooth"), "regauge.gauging")
    | dict.fromkeys(("plane", "reset_batchnorm"), "regauge.connect")
    | {
        "load_alignment": "regauge.checkpoints",
        "save_alignment": "regauge.checkpoints:Alignment.save",
        "align_pairs": "regauge.alignment",
        "fingerprint": "regauge.comparison",
        "fold": "regauge.discovery",
    },
)

__version__ = VERSION
