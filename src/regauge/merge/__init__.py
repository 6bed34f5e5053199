"""One network from many: averages of aligned networks."""

from regauge.merge.average import merge

__all__ = ["merge"]
