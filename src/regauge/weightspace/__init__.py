"""Networks that read and write the weights of networks."""

from regauge.weightspace.hypernetwork import HyperNetwork
from regauge.weightspace.row_encoder import RowEncoder, weight_rows

__all__ = ["HyperNetwork", "RowEncoder", "weight_rows"]
