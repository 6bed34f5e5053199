"""Comparisons of networks up to symmetry (same network, descendant or unrelated), and fingerprints of orbits."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(("Branch", "join_neighbors"), "regauge.comparison.trees")
    | {
        "TensorShare": "regauge.comparison.pair",
        "named_parents": "regauge.comparison.origins",
        "SIZE": "regauge.comparison.fingerprints",
    },
)
