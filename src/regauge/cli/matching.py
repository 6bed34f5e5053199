"""The method that the options of a command ask for."""

import regauge as rg
from regauge.alignment import Method
from regauge.cli.options import Matching, UsageError

NEED_DATA = ("activations", "mixed", "straight-through")


def method_of(options: Matching) -> Method:
    """The method that the options ask for."""
    if options.restarts and options.method not in ("auto", "weights", "frank-wolfe"):
        raise UsageError(f"--restarts is for matching weights; the method {options.method!r} has none")
    if options.data is None and options.method in NEED_DATA:
        raise UsageError(f"the method {options.method!r} needs data: give --data, or choose another one with --method")
    if options.refine and options.data is None:
        raise UsageError("--refine lowers the loss halfway between A and B, which needs data: give --data")
    method = _chosen(options)
    return rg.Sinkhorn(loss="midpoint", init=method) if options.refine else method


def _chosen(options: Matching) -> Method:
    weights = rg.WeightMatching(restarts=options.restarts, scales=options.scales)
    match options.method:
        case "auto" if options.data is None or options.restarts:
            return weights
        case "weights":
            return weights
        case "auto" | "mixed":
            return rg.MixedMatching(scales=options.scales)
        case "activations":
            return rg.ActivationMatching(scales=options.scales)
        case "frank-wolfe":
            return rg.FrankWolfe(restarts=options.restarts, scales=options.scales)
        case "straight-through":
            return rg.StraightThrough(init=weights)
        case "sinkhorn":
            return rg.Sinkhorn(loss="l2" if options.data is None else "midpoint", init=weights)
