"""Fit many INRs: images in stacks, as populations are trained, and shapes side by side."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.inr.fields.signal_samples import Samples, image_samples
from regauge.inr.fitting.fit import Fit, fit
from regauge.inr.representation import Inr
from regauge.nets.siren import Bias
from regauge.training import Adam, Minimum
from regauge.zoo.jobs.executors import one_thread
from regauge.zoo.training import Config, Examples, train

IMAGES = Fit(steps=1000, batch=None, optimizer=Adam(5e-4))
"""Settings of the fits of `mnist-inrs`."""


def image_inr(height: int, width: int, channels: int = 1, *, units: int = 32, depth: int = 2) -> Inr:
    """A SIREN of the size that populations of images have, 2-32-32-1 unless given."""
    return Inr("siren", 2, channels, units, depth, "image", pixels=(height, width))


def fit_images(
    images: Tensor, inr: Inr | None = None, config: Fit = IMAGES, *, bias: Bias = "torch", seed: int = 0
) -> Params:
    """An INR for every image, trained in stacks: hundreds in a minute on one core.

    Every network has a start of its own, which depends on the seed and its number alone; it is that of `Inr.start`.
    For more than fits in memory, and for several processes or machines, train a population (`regauge zoo train`).

    Args:
        images: In [0, 1], `[images, channels, height, width]`.
        inr: Architecture of each network; `image_inr` of this size unless given.
        config: Steps, batch, optimizer and schedule; the loss is the squared error.

    Returns:
        Parameters in the dtype of the images, `[images, ...]`.

    Raises:
        ValueError: The images do not fit the network, another loss is asked for, or a network diverges.
    """
    if images.ndim != 4 or not len(images):
        raise ValueError(f"images are [images, channels, height, width], at least one, not {list(images.shape)}")
    count, channels, height, width = images.shape
    inr = inr or image_inr(height, width, channels)
    if inr.pixels != (height, width) or inr.out_features != channels:
        raise ValueError(
            f"the images have {channels} channels of {height} x {width} pixels, but the network {inr.out_features} of "
            f"{inr.pixels}"
        )
    if config.loss not in (None, "mse"):
        raise ValueError(f"a population of images is fitted by the squared error, not by {config.loss!r}")
    points = image_samples(images[0]).points
    values = images.flatten(2).transpose(1, 2)
    examples = Examples("images", points, values, points, values, is_signals=True)
    population = Config(
        inr.architecture(bias=bias),
        examples.name,
        count,
        seed,
        steps=config.steps,
        batch=config.batch,
        epochs=config.epochs,
        optimizer=config.optimizer,
        schedule=config.schedule,
    )
    blocks = list(train(population, data=examples, dtype=images.dtype))
    diverged = [row["id"] for block in blocks for row in block.rows if row["is_diverged"]]
    if diverged:
        raise ValueError(
            f"{len(diverged)} of {count} networks diverged, the first is {diverged[0]}; lower the learning rate"
        )
    return {name: torch.cat([block.params[name] for block in blocks]) for name in blocks[0].params}


def fit_many(
    inr: Inr,
    samples: Sequence[Samples],
    config: Fit | None = None,
    *,
    starts: Sequence[Mapping[str, Tensor]],
    generators: Sequence[torch.Generator],
    workers: int | None = None,
    progress: Progress = no_progress,
) -> list[Minimum]:
    """`fit` for several signals at once, each on one thread; the results do not depend on the number of workers.

    Networks of shapes are large enough for one to fill a core, so that nothing is gained by stacking them.

    Args:
        starts: Initial parameters of each network; the same ones may be given several times.
        generators: Draw the samples of each network's steps.
        workers: Number of networks that are fitted at the same time; the number of processors unless given.
        progress: Shows the steps of all networks; it is called in the thread that fits each.

    Returns:
        In the order of the samples.

    Raises:
        ValueError: There are not as many starts and generators as signals, or samples do not fit the network.
    """
    if not len(samples) == len(starts) == len(generators):
        raise ValueError(
            f"there are {len(samples)} signals, {len(starts)} starts and {len(generators)} generators; each network "
            "needs one of each"
        )

    config = config or Fit()
    advance = progress("fitting", sum(config.count_steps(len(one)) for one in samples))

    def one(k: int) -> Minimum:
        with one_thread():
            return fit(
                inr,
                samples[k],
                config,
                start=starts[k],
                generator=generators[k],
                progress=lambda label, total: advance,
            )

    with one_thread(), ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return list(pool.map(one, range(len(samples))))
