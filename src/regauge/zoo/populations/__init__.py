"""Populations modulo their symmetry: universes, barriers, distances, clusters and maps."""

from regauge.zoo.populations.fingerprints import Fingerprints
from regauge.zoo.populations.maps import Map, clusters, flat_map
from regauge.zoo.populations.pairs import Barriers, OrbitDistances, mean_barrier
from regauge.zoo.populations.references import medoid, plan_population, reference, sample
from regauge.zoo.populations.universe import Universe, universe

__all__ = [
    "Barriers",
    "Fingerprints",
    "Map",
    "OrbitDistances",
    "Universe",
    "clusters",
    "flat_map",
    "mean_barrier",
    "medoid",
    "plan_population",
    "reference",
    "sample",
    "universe",
]
