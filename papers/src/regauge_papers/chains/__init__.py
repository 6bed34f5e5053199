"""Reimplementations of published nets over networks for chains of linear layers, for comparisons."""

from regauge_papers.chains.config import ChainConfig
from regauge_papers.chains.net import ChainDWS
from regauge_papers.chains.scale_config import ChainScaleConfig
from regauge_papers.chains.scale_net import ChainScaleGMN

__all__ = ["ChainConfig", "ChainDWS", "ChainScaleConfig", "ChainScaleGMN"]
