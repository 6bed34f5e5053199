"""Metanetworks: neural networks that read and write the weights of other networks."""

from regauge.names import attach

CHAINS = ("ChainConfig", "ChainDWS", "ChainScaleConfig", "ChainScaleGMN")
"""Nets that follow the published code of other papers, for comparison in the experiments of `regauge_papers`."""

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={name: f"regauge_papers.chains:{name}" for name in CHAINS} | {"save_net": "regauge.weightspace:Metanet.save"},
)
