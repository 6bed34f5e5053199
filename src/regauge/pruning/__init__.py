"""Structured pruning, which removes units of groups from every tensor on which the group acts."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={
        "PruneCertificate": "regauge.pruning.pruned",
        "Removal": "regauge.pruning.exact",
    },
)
