"""Are two networks the same, one the other's descendant, or neither? Fingerprints of orbits, and comparisons."""

from regauge.comparison.fingerprints import SIZE, fingerprint

__all__ = ["SIZE", "fingerprint"]
