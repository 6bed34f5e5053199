"""Populations up to their symmetry: common coordinates (universes), barriers, distances, clusters and maps."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    None,
    moved=dict.fromkeys(("Barriers", "Fingerprints", "Map", "OrbitDistances", "Universe"), "regauge.zoo")
    | dict.fromkeys(("clusters", "flat_map", "mean_barrier", "medoid", "plan_population"), "regauge.zoo")
    | dict.fromkeys(("reference", "sample", "universe"), "regauge.zoo"),
)
