"""Fitting a network to a named signal, from a random, a shared or an earlier initialization."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.data.shapes import shared_start
from regauge.inr.fields.signal_samples import Queries, entropy_floor
from regauge.inr.fit_config import FitConfig, Represented
from regauge.inr.fitting import fit, mean_loss
from regauge.inr.named_signals import GridSignal, ImageSignal, Signal, read_signal, signal_samples
from regauge.inr.representation import Inr, load_inr
from regauge.nets.siren import Bias

SHAPE_SIZES, IMAGE_SIZES = (512, 4), (256, 3)
"""The default width and depth, for shapes and for images."""


@dataclass(frozen=True)
class SignalFit:
    """A network that was fitted to a signal.

    Attributes:
        params: The fitted parameters.
        inr: The description of the network.
        loss: The mean loss on all samples.
        samples: The number of samples.
        floor: The smallest possible loss, which is the entropy of the labels; None if the network does not represent a
            distance.
    """

    params: Params
    inr: Inr
    loss: float
    samples: int
    floor: float | None


def fit_signal(
    target: str,
    config: FitConfig | None = None,
    *,
    kind: Literal["siren", "relu"] = "siren",
    width: int | None = None,
    depth: int | None = None,
    signal: Represented | None = None,
    start: str = "random",
    bias: Bias = "torch",
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
) -> SignalFit:
    """Fit a network to an image or a shape.

    Args:
        target: The signal, as `read_signal` reads it.
        config: Settings of the fit.
        kind: Sine layers or ReLU layers.
        width: Number of units in each hidden layer; by default 512 for shapes and 256 for images.
        depth: Number of hidden layers; by default 4 for shapes and 3 for images.
        signal: The quantity that the network of a shape represents; by default "unsigned", or "occupancy" for a grid of
            cells.
        start: "random", "shared" (the initialization that all networks of inr2vec share), or the path of a fit.
        bias: Initialization of biases, for a random start.
        generator: The random generator; by default a generator with seed 0.
        progress: Displays the progress of the fit.

    Raises:
        ValueError: The start has another architecture, the signal does not fit the network, or the fit diverged.
    """
    config, generator = config or FitConfig(), generator or torch.Generator().manual_seed(0)
    known = read_signal(target)
    inr = _network(known, target, kind, width, depth, signal)
    begin = inr.start(generator, bias=bias) if start == "random" else _start(start, inr)
    samples = signal_samples(known, inr, Queries(), generator=generator)
    fitted = fit(inr, samples, config, start=begin, generator=generator, progress=progress)
    found = mean_loss(inr, fitted.params, samples, config)
    if not math.isfinite(found):
        raise ValueError(f"the fit diverged, its loss is {found}: give a lower `lr=` than {config.optimizer.lr}")
    floor = float(entropy_floor(samples.labels)) if inr.is_distance else None
    return SignalFit(fitted.params, inr, found, len(samples), floor)


def _network(
    known: Signal,
    target: str,
    kind: Literal["siren", "relu"],
    width: int | None,
    depth: int | None,
    signal: Represented | None,
) -> Inr:
    """Return the description of the network that is fitted to a signal."""
    sizes = IMAGE_SIZES if isinstance(known, ImageSignal) else SHAPE_SIZES
    width, depth = (own if given is None else given for given, own in zip((width, depth), sizes, strict=True))
    if isinstance(known, ImageSignal):
        if signal is not None:
            raise ValueError(f"{target!r} is an image, for which `signal={signal}` is not possible; leave it out")
        channels, *pixels = known.values.shape
        return Inr(kind, 2, channels, width, depth, "image", pixels=(pixels[0], pixels[1]))
    return Inr(kind, 3, 1, width, depth, signal or ("occupancy" if isinstance(known, GridSignal) else "unsigned"))


def _start(start: str, inr: Inr) -> Params:
    """Return the parameters of a shared or earlier initialization, for a network with the same description."""
    params, there = (shared_start(), Inr()) if start == "shared" else load_inr(start)
    if (there.kind, there.widths, there.omega) != (inr.kind, inr.widths, inr.omega):
        raise ValueError(
            f"the start is a {there.kind} {'-'.join(map(str, there.widths))}, but a {inr.kind} "
            f"{'-'.join(map(str, inr.widths))} is fitted; choose `kind=`, `width=` and `depth=` of the start"
        )
    return params
