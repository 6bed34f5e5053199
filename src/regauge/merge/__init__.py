"""One network from many: means and soups of aligned networks, and sums of their task vectors."""

from regauge.merge.merge import merge, merged
from regauge.merge.record import Merged, MergeRecord
from regauge.merge.rules import Average, Dare, GreedySoup, TaskArithmetic, Ties

__all__ = ["Average", "Dare", "GreedySoup", "MergeRecord", "Merged", "TaskArithmetic", "Ties", "merge", "merged"]
