"""Networks that read and write the weights of networks."""

from regauge.names import attach

CHAINS = ("ChainConfig", "ChainDWS", "ChainScaleConfig", "ChainScaleGMN")
"""Nets as their published code computes them, which the papers' experiments compare with."""

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={name: f"regauge_papers.chains:{name}" for name in CHAINS} | {"save_net": "regauge.weightspace:Metanet.save"},
)
