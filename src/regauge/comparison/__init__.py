"""Are two networks the same, one the other's descendant, or neither? Fingerprints of orbits, and comparisons."""

from regauge.comparison.averages import Average
from regauge.comparison.compare_networks import compare
from regauge.comparison.comparison import Comparison
from regauge.comparison.fingerprints import SIZE, fingerprint
from regauge.comparison.many import Lineage, compare_many
from regauge.comparison.origins import named_parents
from regauge.comparison.shares import TensorShare
from regauge.comparison.trees import Branch, join_neighbors, tree_lines

__all__ = [
    "SIZE",
    "Average",
    "Branch",
    "Comparison",
    "Lineage",
    "TensorShare",
    "compare",
    "compare_many",
    "fingerprint",
    "join_neighbors",
    "named_parents",
    "tree_lines",
]
