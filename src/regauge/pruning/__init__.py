"""Structured pruning: units of groups removed wherever they have a placement."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={
        "PruneCertificate": "regauge.pruning.pruned",
        "Removal": "regauge.pruning.exact",
    },
)
