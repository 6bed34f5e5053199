"""Deep weight space networks as their published code computes them, on chains of linear layers."""

from regauge.weightspace.chains.config import ChainConfig
from regauge.weightspace.chains.net import ChainDWS

__all__ = ["ChainConfig", "ChainDWS"]
