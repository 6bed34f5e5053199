"""Training of populations: one program trains many networks."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    None,
    moved=dict.fromkeys(("Choice", "Initialization", "LogUniform", "Uniform"), "regauge.training")
    | dict.fromkeys(("SGD", "Adam", "AdamW", "Constant", "Cosine", "OneCycle", "StepDecay"), "regauge.training")
    | dict.fromkeys(("Architecture", "Store"), "regauge.storage")
    | dict.fromkeys(("SETS", "Checkpoints", "ClassHalves", "Config", "Discard", "Examples"), "regauge.zoo")
    | dict.fromkeys(("Fraction", "load_examples", "train"), "regauge.zoo"),
)
