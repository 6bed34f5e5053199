"""Populations of networks: trained, stored, imported, aligned."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(("Choice", "Initialization", "LogUniform", "Uniform"), "regauge.training")
    | dict.fromkeys(("SGD", "Adam", "AdamW", "Constant", "Cosine", "OneCycle", "StepDecay"), "regauge.training")
    | dict.fromkeys(("Architecture", "Store"), "regauge.storage"),
)
