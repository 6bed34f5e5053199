"""One network from many: means and soups, sums of task vectors, trunks that networks of several tasks share."""

from regauge.merging.merge import merge, merged
from regauge.merging.record import Merged, MergeRecord
from regauge.merging.rules import Average, Dare, GreedySoup, TaskArithmetic, Ties
from regauge.merging.trunk import TrunkMerge, groups_before, merge_trunk
from regauge.merging.widths import merge_widths

__all__ = [
    "Average",
    "Dare",
    "GreedySoup",
    "MergeRecord",
    "Merged",
    "TaskArithmetic",
    "Ties",
    "TrunkMerge",
    "groups_before",
    "merge",
    "merge_trunk",
    "merge_widths",
    "merged",
]
