"""One network from many: means and soups, means on spheres, sums of task vectors."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
