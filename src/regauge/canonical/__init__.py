"""Canonical forms: one network for each orbit, and the manifold of all of them."""

from regauge.canonical.canonicalize import (
    canonical_element,
    canonicalize,
    factorize,
    normalize_logits,
    orbit_distance,
)
from regauge.canonical.manifold import Manifold, canonical_manifold

__all__ = [
    "Manifold",
    "canonical_element",
    "canonical_manifold",
    "canonicalize",
    "factorize",
    "normalize_logits",
    "orbit_distance",
]
