"""Populations of networks: trained, stored, imported, aligned.

The names below are imported when they are first used; everything else is in the packages that they come from.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.storage.architecture import Architecture
    from regauge.storage.store import Store
    from regauge.zoo import presets
    from regauge.zoo.formats import import_zoo
    from regauge.zoo.populations import (
        Barriers,
        Map,
        OrbitDistances,
        Universe,
        clusters,
        flat_map,
        medoid,
        plan_population,
        universe,
    )
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
    "Architecture": "regauge.storage.architecture",
    "Store": "regauge.storage.store",
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
_HOMES |= dict.fromkeys(
    (
        "Barriers",
        "Map",
        "OrbitDistances",
        "Universe",
        "clusters",
        "flat_map",
        "medoid",
        "plan_population",
        "universe",
    ),
    "regauge.zoo.populations",
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Architecture",
    "Barriers",
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
    "Map",
    "OneCycle",
    "OrbitDistances",
    "StepDecay",
    "Store",
    "Uniform",
    "Universe",
    "clusters",
    "flat_map",
    "import_zoo",
    "medoid",
    "plan_population",
    "presets",
    "train",
    "universe",
]


def __getattr__(name: str) -> Any:
    if name == "presets":
        return import_module("regauge.zoo.presets")
    if name not in _HOMES:
        raise AttributeError(f"module 'regauge.zoo' has no attribute {name!r}; its names are {__all__}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
