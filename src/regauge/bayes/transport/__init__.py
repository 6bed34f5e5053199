"""Optimal transport between posteriors: distances, geodesics, and mixtures as the misleading control."""

from regauge.bayes.transport.distances import SquaredDistance, distance
from regauge.bayes.transport.geodesics import Displacement, geodesic
from regauge.bayes.transport.mixtures import MixturePath, MixturePosterior, mixture

__all__ = [
    "Displacement",
    "MixturePath",
    "MixturePosterior",
    "SquaredDistance",
    "distance",
    "geodesic",
    "mixture",
]
