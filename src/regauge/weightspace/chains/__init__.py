"""Nets over networks as their published code computes them, on chains of linear layers, to compare with."""

from regauge.weightspace.chains.config import ChainConfig
from regauge.weightspace.chains.net import ChainDWS
from regauge.weightspace.chains.scale_config import ChainScaleConfig
from regauge.weightspace.chains.scale_net import ChainScaleGMN

__all__ = ["ChainConfig", "ChainDWS", "ChainScaleConfig", "ChainScaleGMN"]
