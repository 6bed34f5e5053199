"""The method that the options of a command ask for."""

from dataclasses import replace
from typing import Any

import regauge as rg
from regauge.alignment import METHODS, Method
from regauge.cli.options import Matching, UsageError


def method_of(options: Matching) -> Method:
    """The method that the options ask for."""
    name, has_data = options.method, options.data is not None
    if name == "auto":
        name = "mixed" if has_data and not options.restarts else "weights"
    row = METHODS[name]
    method = row.load()(**({} if has_data else row.without_data))
    if options.restarts and not hasattr(method, "restarts"):
        raise UsageError(f"--restarts is for matching weights; the method {name!r} has none")
    if row.needs_data and not has_data and not row.without_data:
        raise UsageError(f"the method {name!r} needs data: give --data, or choose another one with --method")
    if options.refine and not has_data:
        raise UsageError("--refine lowers the loss halfway between A and B, which needs data: give --data")
    method = configure(method, options)
    return rg.Sinkhorn(loss="midpoint", init=method) if options.refine else method


def configure(method: Method, options: Matching) -> Method:
    """The method with the options that it has settings for; the methods within it take over the scales."""
    own: dict[str, Any] = {"restarts": options.restarts} if hasattr(method, "restarts") else {}
    return _rescale(replace(method, **own), options.scales)  # type: ignore[type-var]


def _rescale(method: Method, scales: str) -> Method:
    settings: dict[str, Any] = {"scales": scales} if hasattr(method, "scales") else {}
    for name, value in vars(method).items():
        if isinstance(value, Method):
            settings[name] = _rescale(value, scales)
        elif isinstance(value, tuple) and value and isinstance(value[0], Method):
            settings[name] = tuple(_rescale(one, scales) for one in value)
    return replace(method, **settings)  # type: ignore[type-var]
