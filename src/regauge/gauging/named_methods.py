"""Gauge methods by their names on the command line."""

from dataclasses import fields
from typing import Any, Literal

from regauge.gauging.gauge_method import GaugeMethod
from regauge.gauging.methods.best_gauge import BestGauge
from regauge.gauging.methods.equalize import Equalize
from regauge.gauging.methods.learned_rotation import LearnedRotation
from regauge.gauging.methods.smooth import Smooth
from regauge.gauging.methods.spreading_rotations import Hadamard, RandomRotation
from regauge.gauging.rounding import RoundToNearest

METHODS: dict[str, type[GaugeMethod]] = {
    "equalize": Equalize,
    "smooth": Smooth,
    "hadamard": Hadamard,
    "random": RandomRotation,
    "learned": LearnedRotation,
}
"""The methods by name; "best" tries several of them."""


def named_method(
    name: str, scheme: RoundToNearest, *, is_loss: bool, is_kept_always: bool = False, **settings: Any
) -> BestGauge:
    """Return the named method, as a `BestGauge`.

    The result keeps the unchanged network if rounding causes a smaller error in the unchanged network.

    Args:
        name: A key of `METHODS`, or "best".
        scheme: The rounding scheme for which the gauge is chosen.
        is_loss: Whether networks are compared by the task's loss instead of the rounding error of the weights.
        is_kept_always: Whether the transformed network is kept even if rounding damages it more than the unchanged
            network.
        settings: Settings that only some methods have: `steps` and `by` of learned rotations.
    """
    chosen = None
    if name != "best":
        kind: Any = METHODS[name]
        # If the loss of the whole network decides, groups are rotated even if their own rounding error grows.
        every = {"scheme": scheme, "is_kept_always": is_kept_always or is_loss, **settings}
        chosen = (kind(**{field.name: every[field.name] for field in fields(kind) if field.name in every}),)
    by: Literal["loss", "weights"] = "loss" if is_loss else "weights"
    return BestGauge(scheme, chosen, by, settings.get("steps", 100), is_kept_always)


def name_of(method: GaugeMethod) -> str:
    """Return the name of a method, or the name of its class if the method has no name."""
    if isinstance(method, BestGauge):
        return name_of(method.methods[0]) if method.methods is not None and len(method.methods) == 1 else "best"
    return next((name for name, kind in METHODS.items() if type(method) is kind), type(method).__name__)
