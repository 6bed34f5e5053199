"""Training of networks, one or many at once, with optimizers, learning rate schedules and initializations."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={
        "Descent": "regauge.training.training_configs:DescentConfig",
        "Minimum": "regauge.training.descent",
    },
)
