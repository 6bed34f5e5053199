"""Populations of networks: trained, stored, imported, aligned.

The names below are imported when they are first used; everything else is in the packages that they come from.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.zoo import presets
    from regauge.zoo.architecture import Architecture
    from regauge.zoo.formats import import_zoo
    from regauge.zoo.store import Store
    from regauge.zoo.training import (
        SGD,
        Adam,
        AdamW,
        Checkpoints,
        Choice,
        ClassHalves,
        Config,
        Constant,
        Cosine,
        Discard,
        Examples,
        Fraction,
        Initialization,
        LogUniform,
        OneCycle,
        StepDecay,
        Uniform,
        train,
    )

_HOMES = {
    "Architecture": "regauge.zoo.architecture",
    "Store": "regauge.zoo.store",
    "import_zoo": "regauge.zoo.formats",
} | dict.fromkeys(
    (
        "SGD",
        "Adam",
        "AdamW",
        "Checkpoints",
        "Choice",
        "ClassHalves",
        "Config",
        "Constant",
        "Cosine",
        "Discard",
        "Examples",
        "Fraction",
        "Initialization",
        "LogUniform",
        "OneCycle",
        "StepDecay",
        "Uniform",
        "train",
    ),
    "regauge.zoo.training",
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Architecture",
    "Checkpoints",
    "Choice",
    "ClassHalves",
    "Config",
    "Constant",
    "Cosine",
    "Discard",
    "Examples",
    "Fraction",
    "Initialization",
    "LogUniform",
    "OneCycle",
    "StepDecay",
    "Store",
    "Uniform",
    "import_zoo",
    "presets",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "presets":
        return import_module("regauge.zoo.presets")
    if name not in _HOMES:
        raise AttributeError(f"module 'regauge.zoo' has no attribute {name!r}; its names are {__all__}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
