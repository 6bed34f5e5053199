"""Settings for the populations in the papers, called presets. Change presets with `dataclasses.replace`.

Each function's docstring names the settings that the paper does not specify.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from regauge.names import absent, did_you_mean
from regauge.storage.architecture import Architecture
from regauge.training.initialization import Initialization
from regauge.training.optimizers import SGD, Adam, AdamW
from regauge.training.settings import Choice, LogUniform
from regauge.zoo.training.config import Checkpoints, ClassHalves, Fraction, PopulationConfig
from regauge.zoo.training.examples import WAVE_POINTS, WAVES

TABLE_4: list[int | str] = [16, 32, 32, "pool", 64, 64, "pool", 128, 128, "pool"]
"""The channels and pooling layers of the CNN in Navon et al. (2024), table 4."""
VGG11: list[int | str] = [64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"]
"""The channels and pooling layers of VGG11, configuration A in Simonyan and Zisserman (2015)."""
SMALL = (1, 16, 16, 16)
"""The channels of the CNNs in Unterthiner et al. (2020), on grayscale images."""
TINY = Initialization(("normal",), 0.1)
"""The initialization of networks in paper 000. The text of the paper says N(0, 0.1 I), but its code samples weights
with a standard deviation of 0.1 and sets biases to zero. The accuracies of the paper's trained networks correspond to
the code."""


def mlp_architecture(*widths: int) -> Architecture:
    """Return an MLP architecture with ReLU and the given widths."""
    return Architecture(f"MLP {'-'.join(map(str, widths))}", "regauge.nets.mlp:mlp", {"widths": list(widths)})


def siren_architecture(in_features: int, width: int, out_features: int, *, depth: int) -> Architecture:
    """Return a SIREN architecture with frequency 30."""
    widths = [in_features, *[width] * depth, out_features]
    settings = {"in_features": in_features, "width": width, "out_features": out_features, "depth": depth}
    return Architecture(f"SIREN {'-'.join(map(str, widths))}", "regauge.nets.siren:Siren", settings)


def cnn_architecture(activation: Literal["relu", "tanh"], *channels: int) -> Architecture:
    """Return the small CNN architecture: 3 x 3 convolutions with the given channels (input first), and mean pooling."""
    settings = {"channels": list(channels), "activation": activation}
    return Architecture(f"small CNN, {activation}", "regauge.zoo.formats.modules:SmallCNN", settings)


def vit_architecture(image: int, patch: int, *, width: int, heads: int) -> Architecture:
    """Return a vision transformer architecture with two blocks, for grayscale images."""
    settings = {"image": image, "patch": patch, "width": width, "layers": 2, "heads": heads}
    return Architecture(f"ViT of width {width}", "regauge.nets.transformer:ViT", settings)


def convolutional_architecture(
    name: str, plan: Sequence[int | str], *, image: int, in_channels: int, narrow: int = 1
) -> Architecture:
    """Return a convolutional architecture from a plan, with one linear layer for ten classes and no normalization.

    Args:
        name: The name of the architecture, in words.
        plan: The channels of convolutions, and "pool", such as `TABLE_4`.
        image: The side length of the images in pixels.
        in_channels: The number of channels of the images.
        narrow: The number by which all channels in the plan are divided.
    """
    channels = [step if isinstance(step, str) else max(1, step // narrow) for step in plan]
    settings = {"plan": channels, "hidden": [], "classes": 10, "image": image, "in_channels": in_channels}
    return Architecture(name, "regauge.nets.vgg:VGG", settings | {"norm": "none"})


def uci_mlps(count: int = 100, seed: int = 0) -> PopulationConfig:
    """Return MLPs 30-16-16-2 on UCI breast cancer: 50 epochs of Adam, checkpoints every 4 steps after 10 epochs.

    The paper does not specify the learning rate, which is 1e-3 here. In `uci_mlps`, batches contain 51 of 410 examples,
    which gives 8 steps per epoch. In the code of the paper, batches contain 64 of 455 examples, which also gives 8
    steps.

    References:
        Paper 000, section 7.2 and its appendix.
    """
    return PopulationConfig(
        mlp_architecture(30, 16, 16, 2),
        "breast-cancer",
        count,
        seed,
        epochs=50,
        batch=51,
        optimizer=Adam(lr=1e-3),
        initialization=TINY,
        checkpoints=Checkpoints(every=4, warmup=80),
    )


def mnist_tiny_mlps(count: int = 50, seed: int = 0) -> PopulationConfig:
    """Return MLPs 784-10-10 on MNIST: 25 epochs of SGD with momentum, checkpoints every 10 steps after 5 epochs.

    The paper does not specify the batch size, which is 128 here.

    References:
        Paper 000, section 7.3 and its appendix.
    """
    return PopulationConfig(
        mlp_architecture(784, 10, 10),
        "mnist",
        count,
        seed,
        epochs=25,
        batch=128,
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-5),
        initialization=TINY,
        # 54,000 examples: 422 steps an epoch.
        checkpoints=Checkpoints(every=10, warmup=2110),
    )


def fashion_tiny_mlps(count: int = 50, seed: int = 0) -> PopulationConfig:
    """Return networks like `mnist_tiny_mlps`, on Fashion-MNIST; see paper 000, section 7.4."""
    return replace(mnist_tiny_mlps(count, seed), data="fashion-mnist")


def mnist_mlps(count: int = 10_000, seed: int = 0) -> PopulationConfig:
    """Return MLPs 784-128-128-128-10 on MNIST: 5 epochs, batch size 128, learning rate 5e-3.

    The paper does not specify the optimizer, which is Adam here.

    References:
        Navon et al. (2024), appendix, MLP classifiers.
    """
    architecture = mlp_architecture(784, 128, 128, 128, 10)
    return PopulationConfig(architecture, "mnist", count, seed, epochs=5, batch=128, optimizer=Adam(lr=5e-3))


def fashion_mlps(count: int = 10_000, seed: int = 0) -> PopulationConfig:
    """Return networks like `mnist_mlps`, on Fashion-MNIST."""
    return replace(mnist_mlps(count, seed), data="fashion-mnist")


def cifar10_mlps(count: int = 10_000, seed: int = 0) -> PopulationConfig:
    """Return MLPs 3072-128-128-128-10 on CIFAR-10 with the training of `mnist_mlps`."""
    return replace(mnist_mlps(count, seed), data="cifar10", architecture=mlp_architecture(3072, 128, 128, 128, 10))


def cifar10_cnns(count: int = 5000, seed: int = 0) -> PopulationConfig:
    """Return CNNs with the plan of table 4 on CIFAR-10: 20 epochs of Adam at 1e-4.

    The paper does not specify the batch size, which is 128 here.

    References:
        Navon et al. (2024), appendix, CNN classifiers.
    """
    architecture = convolutional_architecture("CNN of table 4", TABLE_4, image=32, in_channels=3)
    return PopulationConfig(architecture, "cifar10", count, seed, epochs=20, batch=128, optimizer=Adam(lr=1e-4))


def cifar10_vggs(count: int = 4700, seed: int = 0) -> PopulationConfig:
    """Return VGG11 with one linear layer (9 million parameters) on CIFAR-10.

    The paper specifies neither the training nor the initialization. `cifar10_vggs` uses the training of `cifar10_cnns`,
    and the initialization of He et al., which torchvision uses for VGGs. With torch's default initialization, networks
    with eight convolutions begin to learn only after many steps.

    References:
        Navon et al. (2024), appendix F, scaling to large networks.
    """
    architecture = convolutional_architecture("VGG11", VGG11, image=32, in_channels=3)
    return replace(cifar10_cnns(count, seed), architecture=architecture, initialization=Initialization(("he",)))


def cifar10_halves(count: int = 5000, seed: int = 0) -> PopulationConfig:
    """Return CNNs like `cifar10_cnns`.

    Half of the groups are trained on 95% of classes 0-4 and 5% of classes 5-9. The second half of the groups is trained
    on the remaining examples.

    References:
        Navon et al. (2024), section 6, merging networks trained on disjoint data sets.
    """
    return replace(cifar10_cnns(count, seed), subset=ClassHalves(0.95))


def small_cnns_tanh(count: int = 10_000, seed: int = 0) -> PopulationConfig:
    """Return small CNNs of very different quality, because initialization, learning rate, weight decay and data vary.

    Learning rates are log-uniform in [5e-4, 5e-2], and weight decays in [1e-8, 1e-2]. Networks are trained on 10%, 25%,
    50% or all of the examples. In the public zoo, networks are trained for 86 epochs with dropout and a random
    optimizer. The networks of this preset are trained for 20,000 steps of Adam, without dropout and with decoupled
    decay. Images are grayscale, so the networks have the same shapes as in the public zoo.

    References:
        Unterthiner et al. (2020), section 3 and appendix.
    """
    return PopulationConfig(
        cnn_architecture("tanh", *SMALL),
        "cifar10-gray",
        count,
        seed,
        steps=20_000,
        batch=128,
        optimizer=AdamW(lr=LogUniform(5e-4, 5e-2), weight_decay=LogUniform(1e-8, 1e-2)),
        initialization=Initialization(("normal", "he", "glorot", "orthogonal"), LogUniform(0.1, 1.0)),
        subset=Fraction(Choice((0.1, 0.25, 0.5, 1.0))),
    )


def small_cnns_relu(count: int = 10_000, seed: int = 0) -> PopulationConfig:
    """Return networks like `small_cnns_tanh`, with ReLU."""
    return replace(small_cnns_tanh(count, seed), architecture=cnn_architecture("relu", *SMALL))


def cnn_zoo(count: int = 400, seed: int = 0) -> PopulationConfig:
    """Return networks like `small_cnns_relu` on Fashion-MNIST, with 300 steps at batch size 64.

    Training one network takes a second on one core. Each network has checkpoints at three steps. Only 16 networks share
    their batches, so the networks are trained on many different shares of the data.
    """
    return replace(
        small_cnns_relu(count, seed),
        data="fashion-mnist",
        steps=300,
        batch=64,
        group=16,
        checkpoints=Checkpoints(every=120, warmup=60),
    )


def cnn_zoo_sgd(count: int = 200, seed: int = 1) -> PopulationConfig:
    """Return networks like `cnn_zoo`, by SGD with varied momentum; learning rates are log-uniform in [5e-3, 0.5]."""
    optimizer = SGD(LogUniform(5e-3, 0.5), momentum=Choice((0.0, 0.9)), weight_decay=LogUniform(1e-8, 1e-2))
    return replace(cnn_zoo(count, seed), optimizer=optimizer)


def vit_zoo(count: int = 300, seed: int = 0) -> PopulationConfig:
    """Return vision transformers of width 16 on Fashion-MNIST, trained for 100 steps with different settings.

    Learning rates are log-uniform in [3e-4, 3e-2], weight decays in [1e-3, 1], and initialization scales in [0.3, 2].
    Networks are trained on 1%, 10% or all of the examples. Each image has 16 patches, and each network has two blocks
    with two heads.
    """
    return PopulationConfig(
        vit_architecture(28, 7, width=16, heads=2),
        "fashion-mnist",
        count,
        seed,
        steps=100,
        batch=64,
        optimizer=AdamW(lr=LogUniform(3e-4, 3e-2), weight_decay=LogUniform(1e-3, 1.0)),
        initialization=Initialization(("factory", "he", "glorot", "orthogonal"), LogUniform(0.3, 2.0)),
        subset=Fraction(Choice((0.01, 0.1, 1.0))),
        group=16,
    )


def sine_inrs(count: int = 2 * WAVES, seed: int = 0) -> PopulationConfig:
    """Return SIRENs 1-32-32-1 that fit sine waves, two networks for each wave.

    The paper does not specify the steps and the learning rate; here, networks are trained for 1,000 steps of Adam at
    5e-4.

    References:
        Navon et al. (2024), section 6.1 and appendix; Navon et al. (2023), section 7.
    """
    return PopulationConfig(
        siren_architecture(1, 32, 1, depth=2),
        "sine-waves",
        count,
        seed,
        steps=1000,
        batch=WAVE_POINTS,
        optimizer=Adam(lr=5e-4),
        copies=2,
    )


def mnist_inrs(count: int = 70_000, seed: int = 0) -> PopulationConfig:
    """Return SIRENs 2-32-32-1 that fit MNIST's images: 1,000 steps of Adam at 5e-4 on all pixels.

    The column "split" is "test" for test images. Test images are spread evenly among all images, so smaller populations
    contain networks of training and of test images.

    References:
        Navon et al. (2023), appendix: unlike the networks of this preset, their networks add 0.5 to the output.
    """
    architecture = siren_architecture(2, 32, 1, depth=2)
    return replace(sine_inrs(count, seed), architecture=architecture, data="mnist-signals", batch=None, copies=1)


def mnist_inrs_one_start(count: int = 70_000, seed: int = 0) -> PopulationConfig:
    """Return networks like `mnist_inrs`, with frequency 15 and one shared initialization.

    The networks are trained for 60 steps of gradient descent with momentum. Units keep the order that they have in the
    initialization, and training changes the networks along few directions. Therefore a flow over principal components
    can sample networks of digits. The population does not come from a paper.
    """
    base = mnist_inrs(count, seed)
    architecture = replace(base.architecture, settings={**base.architecture.settings, "omega": 15.0})
    start = Initialization(is_common=True)
    return replace(
        base, architecture=architecture, steps=60, optimizer=SGD(lr=1e-2, momentum=0.9), initialization=start
    )


def fashion_inrs(count: int = 70_000, seed: int = 0) -> PopulationConfig:
    """Return networks like `mnist_inrs`, for Fashion-MNIST."""
    return replace(mnist_inrs(count, seed), data="fashion-mnist-signals")


def cifar10_inrs(count: int = 300_000, seed: int = 0) -> PopulationConfig:
    """Return SIRENs 2-32-32-32-32-3 that fit CIFAR-10's images, five for each image: 10,000 Adam steps at 1e-4.

    References:
        Navon et al. (2024), section 6.1 and appendix.
    """
    return replace(
        mnist_inrs(count, seed),
        architecture=siren_architecture(2, 32, 3, depth=4),
        data="cifar10-signals",
        steps=10_000,
        optimizer=Adam(lr=1e-4),
        copies=5,
    )


PRESETS: dict[str, Callable[[], PopulationConfig]] = {
    "uci-mlps": uci_mlps,
    "mnist-tiny-mlps": mnist_tiny_mlps,
    "fashion-tiny-mlps": fashion_tiny_mlps,
    "mnist-mlps": mnist_mlps,
    "fashion-mlps": fashion_mlps,
    "cifar10-mlps": cifar10_mlps,
    "cifar10-cnns": cifar10_cnns,
    "cifar10-vggs": cifar10_vggs,
    "cifar10-halves": cifar10_halves,
    "small-cnns-relu": small_cnns_relu,
    "small-cnns-tanh": small_cnns_tanh,
    "cnn-zoo": cnn_zoo,
    "cnn-zoo-sgd": cnn_zoo_sgd,
    "vit-zoo": vit_zoo,
    "sine-inrs": sine_inrs,
    "mnist-inrs": mnist_inrs,
    "mnist-inrs-one-start": mnist_inrs_one_start,
    "fashion-inrs": fashion_inrs,
    "cifar10-inrs": cifar10_inrs,
}
"""The presets by their names on the command line. Every function takes the arguments `count` and `seed`."""


def find_preset(name: str) -> PopulationConfig:
    """Return the preset for a name on the command line.

    Raises:
        ValueError: There is no preset with the given name.
    """
    if name not in PRESETS:
        hint = f"{did_you_mean(name, PRESETS)}there are {', '.join(PRESETS)}"
        raise ValueError(f"there is no preset {name!r}; {hint}; or write package.module:factory")
    return PRESETS[name]()


if not TYPE_CHECKING:  # type checkers find names that are missing themselves

    def __getattr__(name: str) -> Any:
        raise absent(__name__, name, (make.__name__ for make in PRESETS.values()))
