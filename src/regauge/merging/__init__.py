"""One network from many: means and soups, sums of task vectors."""

from regauge.merging.merge import merge
from regauge.merging.merge_record import MergeRecord, MergeResult
from regauge.merging.rules import Average, Dare, GreedySoup, TaskArithmetic, Ties
from regauge.merging.widths import merge_widths

__all__ = [
    "Average",
    "Dare",
    "GreedySoup",
    "MergeRecord",
    "MergeResult",
    "TaskArithmetic",
    "Ties",
    "merge",
    "merge_widths",
]
