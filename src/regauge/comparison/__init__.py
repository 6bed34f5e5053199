"""Are two networks the same, one the other's descendant, or neither? Fingerprints of orbits, and comparisons."""

from regauge.comparison.compare_networks import compare
from regauge.comparison.comparison import Comparison
from regauge.comparison.fingerprints import SIZE, fingerprint
from regauge.comparison.shares import TensorShare

__all__ = ["SIZE", "Comparison", "TensorShare", "compare", "fingerprint"]
