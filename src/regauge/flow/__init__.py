"""Flows on weights: generative models that sample networks without training them."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={
        "Config": "regauge.flow:FlowConfig",
        "NETS": "regauge.flow.nets",
        "save_flow": "regauge.flow:Flow.save",
        "Score": "regauge.flow.judgement",
        "TIMES": "regauge.flow.times",
    },
)
