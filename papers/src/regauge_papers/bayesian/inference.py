"""Families of posteriors: their data, networks and inference. Trained posteriors are stored on the disk."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

import regauge as rg
from regauge.alignment import Method
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Noise
from regauge.bayes.variational.mean_field import VariationalConfig, fit
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.data.images import ImageData
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig, initialize, split_batches, train
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20
from regauge.training import SGD, Adam, Constant, Cosine
from regauge_papers.experiment import Name, Run
from regauge_papers.populations import DataName, images, name_training

Kind = Literal["mlp", "filter", "layer"]
"""The kind of network: an MLP, or a residual network with filter response normalization or layer normalization."""


@dataclass(frozen=True, repr=False)
class Family:
    """Posteriors of networks of one architecture on the same images, inferred from different seeds."""

    data: DataName  # the images, with pixels in [0, 1] unless they are normalized
    kind: Kind
    width: int  # units of the three hidden layers of an MLP, or channels in units of 16 of a residual network
    inference: VariationalConfig | ClassifierConfig  # the latter finds a point instead
    examples: int  # training images: the first of the data set
    blocks: int = 3  # residual blocks of each stage
    augmentation: Augmentation | None = None  # of training images
    is_bfloat16: bool = False  # whether they are inferred in it (see `Run.has_bfloat16`); posteriors remain float32

    def __repr__(self) -> str:
        fields = f"data={self.data!r}, kind={self.kind!r}, width={self.width}, inference={self.settings}"
        fields += f", examples={self.examples}, blocks={self.blocks}"
        if self.augmentation is not None:
            fields += f", augmentation={self.augmentation}"
        if self.is_bfloat16:
            fields += ", is_bfloat16=True"
        return f"Family({fields})"

    @property
    def settings(self) -> str:
        """The name of the inference settings, from which random seeds are derived."""
        how = self.inference
        return name_training(how) if isinstance(how, ClassifierConfig) else name_inference(how)

    @property
    def shown_settings(self) -> str:
        """The settings as shown in tables, where numbers are rounded."""
        return re.sub(r"\d+\.\d{9,}", lambda found: f"{float(found[0]):g}", self.settings)

    @property
    def name(self) -> str:
        """A description of the family."""
        data = self.data if self.augmentation is None else f"{self.data} augmented"
        if self.kind == "mlp":
            return f"MLP, 3 x {self.width}, {data}"
        norm = {"filter": "FRN", "layer": "LayerNorm"}[self.kind]
        return f"ResNet{6 * self.blocks + 2} x{self.width}, {norm}, {data}"

    @property
    def variational(self) -> VariationalConfig:
        """The settings of variational inference, which networks without uncertainty do not have."""
        if not isinstance(self.inference, VariationalConfig):
            raise TypeError(f"{self.name} is trained as points, which have no prior")
        return self.inference

    def images(self) -> ImageData:
        """The training and test images."""
        return images(self.data)

    def module(self) -> nn.Module:
        """Return a network with random weights and the architecture of the family."""
        channels, height, width = self.images().train_images.shape[1:]
        classes = self.images().classes
        if self.kind == "mlp":
            return mlp(channels * height * width, *[self.width] * 3, classes)
        return resnet20(classes, width=self.width, in_channels=channels, blocks=self.blocks, norm=self.kind)

    def symmetry(self) -> rg.Symmetry:
        """The symmetry of the architecture."""
        return rg.discover(self.module(), (self.images().test_images[:4],))


def name_inference(inference: VariationalConfig) -> Name:
    """Return a name of the inference settings, from which random seeds are derived; see `name_training`."""
    optimizer, is_constant = inference.optimizer, inference.schedule == Constant()
    plain: SGD | Adam
    if isinstance(optimizer, SGD):
        kind, momentum = "sgd", optimizer.momentum
        plain = SGD(optimizer.lr, momentum=momentum)
    else:
        kind, momentum = "adam", optimizer.betas[0]
        plain = Adam(optimizer.lr, betas=(optimizer.betas[0], 0.999))
    if inference != replace(inference, optimizer=plain, schedule=Constant() if is_constant else Cosine()):
        return Name(repr(inference))
    schedule = "constant" if is_constant else "cosine"
    return Name(
        f"Variational(epochs={inference.epochs}, batch={inference.batch}, prior_std={inference.prior_std}, "
        f"temperature={inference.temperature}, initial_std={inference.initial_std}, optimizer={kind!r}, "
        f"momentum={momentum}, lr={optimizer.lr}, lr_std={inference.lr_std}, schedule={schedule!r}, "
        f"samples={inference.samples})"
    )


def posteriors(family: Family, count: int, run: Run) -> list[GaussianPosterior]:
    """Fit `count` posteriors of a family. Point estimates are posteriors without uncertainty."""
    if not run.has_bfloat16:
        family = replace(family, is_bfloat16=False)

    def one(unit: Progress, index: int) -> GaussianPosterior:
        def make() -> GaussianPosterior:
            generator = run.generator("posterior", family, index)
            data, module = family.images(), family.module()
            inputs, labels = data.train_images[: family.examples], data.train_labels[: family.examples]
            inputs, labels = run.bring((inputs, labels))
            start, how = run.bring(initialize(module, generator)), family.inference
            module = run.bring(module)
            seen: Any = {
                "generator": generator,
                "augmentation": family.augmentation,
                "state": run.state(family, str(index)),
                "progress": unit,
            }
            with run.autocast(is_bfloat16=family.is_bfloat16):
                if isinstance(how, ClassifierConfig):
                    return GaussianPosterior(train(module, start, inputs, labels, how, **seen), {})
                return fit(start, module, inputs, labels, how, **seen)

        return keep(family, str(index), make, run)

    return run.grid(f"inferring {family.name}", one, range(count))


def keep(settings: object, key: str, make: Callable[[], GaussianPosterior], run: Run) -> GaussianPosterior:
    """Return the posterior that is stored under a key. If no posterior is stored, infer one by `make` and store it."""

    def flat() -> Params:
        found = make()
        return {f"{part}/{name}": tensor for part in found._fields for name, tensor in getattr(found, part).items()}

    parts: dict[str, Params] = {"mean": {}, "std": {}}
    for name, tensor in run.network(settings, key, flat).items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    return GaussianPosterior(**parts)


def batches(family: Family, count: int, *, is_test: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the first `count` training or test images in batches. Batches are small for convolutional networks."""
    data, size = family.images(), 500 if family.kind == "mlp" else 125
    if is_test:
        return split_batches(data.test_images[:count], data.test_labels[:count], size)
    count = min(count, family.examples)
    return split_batches(data.train_images[:count], data.train_labels[:count], size)


def move(
    method: Method | None,
    a: GaussianPosterior,
    b: GaussianPosterior,
    noise: Noise,
    symmetry: rg.Symmetry,
    generator: torch.Generator,
) -> tuple[GaussianPosterior, Noise, float]:
    """Align the second posterior and the noise of its samples, if a method is given. Also return the CPU seconds."""
    if method is None:
        return b, noise, 0.0
    began = time.thread_time()
    element = rg.align(a, b, symmetry, method=method, generator=generator).element
    seconds = time.thread_time() - began
    return b.push(symmetry, element), b.push_noise(symmetry, element, noise) if noise else {}, seconds
