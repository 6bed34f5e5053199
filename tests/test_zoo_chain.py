"""Chains are recognized in modules, and their gradients equal autograd's gradients."""

import platform

import pytest
import torch
from coverings import covering
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.params import Params
from regauge.nets.mlp import mlp
from regauge.nets.siren import Siren
from regauge.nets.vgg import VGG
from regauge.training.chains.chain_steps import steps_of
from regauge.training.chains.image_chain import ImageChain
from regauge.training.chains.vector_chain import Link, VectorChain, links_of
from regauge.training.programs import mean_loss
from regauge.training.threads import keep_freed_memory
from regauge.zoo.formats.modules import SmallCNN

GROUPS, MEMBERS, BATCH = 2, 3, 7


def chain_of(module: nn.Module, *, reads_vectors: bool) -> tuple[Link, ...] | None:
    """Return the links of a fully connected chain."""
    steps = steps_of(module, reads_vectors=reads_vectors)
    return None if steps is None else links_of(steps)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(torch.relu(self.layer(x))))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result if result.sum() > 0 else -result


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


CHAINS = {
    "relu": mlp(4, 5, 3),
    "tanh": mlp(4, 6, 5, 3, activation=torch.tanh),
    "linear": mlp(4, 3),
    "wide input": mlp(20, 5, 1),
    "sine": Siren(2, 6, 1, depth=2, omega=3.0),
    "deep sine": Siren(3, 4, 2, depth=3, omega=2.0),
    "modules": nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3), nn.Tanh()),
    "squashed": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Sigmoid()),
}


def assert_as_autograd(
    module: nn.Module, chain: VectorChain | ImageChain, params: Params, inputs: Tensor, targets: Tensor
) -> None:
    """Assert that losses, gradients and outputs of every network equal those of the module."""
    networks = len(next(iter(params.values())))
    for _ in range(2):  # The second time in buffers that the first one left.
        losses, gradients = chain.gradients(params, inputs, targets)
    outputs = chain.outputs(params, inputs)
    for k in range(networks):
        own = {key: tensor[k].clone().requires_grad_() for key, tensor in params.items()}
        expected = torch.func.functional_call(module, own, (inputs[k // MEMBERS],))
        torch.testing.assert_close(outputs[k], expected, rtol=1e-12, atol=1e-12)
        loss = mean_loss(expected, targets[k // (networks // len(targets))])
        loss.backward()
        torch.testing.assert_close(losses[k], loss.detach(), rtol=1e-12, atol=1e-12)
        for (key, tensor), gradient in zip(own.items(), gradients, strict=True):
            torch.testing.assert_close(gradient[k], tensor.grad, rtol=1e-10, atol=1e-11, msg=lambda m, key=key: key + m)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("kind", ["classes", "values", "signals"])
def test_gradients_are_those_of_autograd(name: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    module = CHAINS[name].double()
    state = module.state_dict()
    networks = GROUPS * MEMBERS
    params = {
        key: torch.randn(networks, *tensor.shape, dtype=torch.float64, generator=generator)
        for key, tensor in state.items()
    }
    tensors = list(state.values())
    inputs = torch.randn(GROUPS, BATCH, tensors[0].shape[1], dtype=torch.float64, generator=generator)
    out = len(tensors[-1])
    if kind == "classes":
        targets = torch.randint(out, (GROUPS, BATCH), generator=generator)
    else:
        count = GROUPS if kind == "values" else networks
        targets = torch.randn(count, BATCH, out, dtype=torch.float64, generator=generator)
    links = chain_of(module, reads_vectors=True)
    assert links is not None
    chain = VectorChain(links)
    assert_as_autograd(module, chain, params, inputs, targets)


@pytest.mark.parametrize("name", ["sine", "tanh"])
def test_single_precision_loses_little(name: str, library: str) -> None:
    """In single precision, numpy computes the functions of hidden layers, and oneDNN may compute products."""
    module = CHAINS[name].double()
    links = chain_of(module, reads_vectors=True)
    assert links is not None
    generator = torch.Generator().manual_seed(0)
    params = {
        key: torch.randn(3, *tensor.shape, dtype=torch.float64, generator=generator)
        for key, tensor in module.state_dict().items()
    }
    size = params["layers.0.weight"].shape[2]
    inputs = torch.randn(1, BATCH, size, dtype=torch.float64, generator=generator)
    targets = torch.zeros(1, BATCH, len(module.state_dict()["layers.2.bias"]), dtype=torch.float64)
    losses, gradients = VectorChain(links).gradients(params, inputs, targets)
    single = {key: tensor.float() for key, tensor in params.items()}
    losses_single, gradients_single = VectorChain(links).gradients(single, inputs.float(), targets.float())
    torch.testing.assert_close(losses_single.double(), losses, rtol=1e-4, atol=1e-4)
    for gradient, other in zip(gradients_single, gradients, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), other, rtol=1e-3, atol=5e-4)
    # What diverges is no reason to warn, and stays where it is.
    single["layers.0.weight"][1] = float("nan")
    losses, gradients = VectorChain(links).gradients(single, inputs.float(), targets.float())
    assert losses.isfinite().tolist() == [True, False, True]
    assert torch.equal(losses[::2], losses_single[::2])
    assert torch.equal(gradients[0][::2], gradients_single[0][::2])


def test_the_links_of_a_siren() -> None:
    links = chain_of(Siren(2, 6, 1, depth=2, omega=3.0), reads_vectors=True)
    assert links is not None
    assert [(link.scale, link.activation) for link in links] == [(3.0, "sin"), (3.0, "sin"), (1.0, "identity")]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * 2.0 if self.training else h


def alter(how: str, module: nn.Module) -> None:
    """Change the function of a layer from outside, for example by a hook."""
    layer = next(part for part in module.modules() if isinstance(part, nn.Linear))
    match how:
        case "hook":
            layer.register_forward_hook(lambda _, __, output: 3 * output)
        case "hook before":
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
        case "hook of the whole":
            module.register_forward_hook(lambda _, __, output: 3 * output)
        case "hook behind":
            layer.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))
        case "hook behind, before":
            layer.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
        case "hook of a function":
            module.get_submodule("1").register_forward_hook(lambda _, __, output: 3 * output)
        case "own forward":
            layer.forward = lambda x: 3 * functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
        case "weight norm":
            nn.utils.parametrizations.weight_norm(layer)
        case "spectral norm":
            nn.utils.spectral_norm(layer)
        case _:
            nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())


@pytest.mark.parametrize(
    "how",
    [
        "hook",
        "hook before",
        "hook of the whole",
        "hook behind",
        "hook behind, before",
        "hook of a function",
        "own forward",
        "weight norm",
        "spectral norm",
        "parametrization",
    ],
)
def test_what_was_attached_makes_no_chain(how: str) -> None:
    vectors = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    images = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))
    for module, reads_vectors in ((vectors, True), (images, False)):
        assert steps_of(module, reads_vectors=reads_vectors) is not None
        alter(how, module)
        assert steps_of(module, reads_vectors=reads_vectors) is None


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 3, bias=False)),
        nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
        Twice(),
        Branching(),
        Unused(),
        Scaled(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_chain(module: nn.Module) -> None:
    assert chain_of(module, reads_vectors=True) is None


def test_images_must_be_flattened() -> None:
    plain = nn.Sequential(nn.Linear(4, 3))
    assert chain_of(plain, reads_vectors=True) is not None
    assert chain_of(plain, reads_vectors=False) is None
    assert chain_of(nn.Sequential(nn.Flatten(), *plain), reads_vectors=False) is not None


class Called(nn.Module):
    """A network with pooling, flattening and activations as functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.max_pool2d(functional.relu(self.first(x)), 2)
        h = functional.max_pool2d(torch.tanh(self.second(h)), kernel_size=2, stride=1)
        result: Tensor = self.head(torch.flatten(h, 1))
        return result


class Averaged(nn.Module):
    """A network with the mean over positions as a method, after a pooling without parameters."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.conv, self.head, self.axes = nn.Conv2d(2, 4, 3, stride=2), nn.Linear(4, 3), axes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.conv(functional.max_pool2d(x, 3, 1, 1) * 2.0))
        result: Tensor = self.head(h.mean(self.axes))
        return result


class Waves(nn.Module):
    """A network with maxima of sines, after a convolution of a mean that keeps its axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mixing, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.max_pool2d(torch.sin(self.conv(x)), 2)
        h = functional.relu(self.mixing(functional.adaptive_avg_pool2d(h, 1)))
        result: Tensor = self.head(torch.flatten(h, 1))
        return result


IMAGE_CHAINS = {
    "sines": Waves(),
    "wide maxima": nn.Sequential(
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.Conv2d(2, 9, 3, stride=(1, 2), padding=(2, 0), dilation=(1, 2)),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(9, 20, (2, 1)),
        nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(80, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    ),
    "small CNN": SmallCNN((2, 4, 5), 3),
    "tanh": SmallCNN((2, 4, 5), 3, activation="tanh"),
    "VGG": VGG((3, "pool", 4), [5], 3, image=8, in_channels=2, norm="none"),
    "functions": Called(),
    "means": Averaged(2, 3),
    "groups and sines": nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=(2, 1), padding=(0, 1), dilation=(1, 2), groups=2, padding_mode="zeros"),
        nn.MaxPool2d(2, stride=1, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(4, 3),
        nn.Sigmoid(),
    ),
    "squashed twice": nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 3), nn.Identity()
    ),
}


@pytest.mark.parametrize(
    ("name", "kind", "piece"), covering(IMAGE_CHAINS, ["classes", "values", "signals"], ["whole", "cut"], of=1)
)
def test_gradients_of_convolutions_are_those_of_autograd(
    name: str, kind: str, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cut = piece == "cut"
    if is_cut:
        monkeypatch.setattr("regauge.training.chains.image_chain.PIECE_BYTES", 2000)
    generator = torch.Generator().manual_seed(0)
    module = IMAGE_CHAINS[name].double()
    networks = GROUPS * MEMBERS
    params = {
        key: torch.randn(networks, *tensor.shape, dtype=torch.float64, generator=generator)
        for key, tensor in module.state_dict().items()
    }
    inputs = torch.randn(GROUPS, BATCH, 2, 8, 8, dtype=torch.float64, generator=generator)
    if kind == "classes":
        targets = torch.randint(3, (GROUPS, BATCH), generator=generator)
    else:
        count = GROUPS if kind == "values" else networks
        targets = torch.randn(count, BATCH, 3, dtype=torch.float64, generator=generator)
    steps = steps_of(module, reads_vectors=False)
    assert steps is not None
    assert links_of(steps) is None
    chain = ImageChain(steps)
    assert (chain._counts(params, inputs[0], is_blocked=False)[0] > 1) == is_cut
    kept = inputs.clone()
    assert_as_autograd(module, chain, params, inputs, targets)
    assert torch.equal(inputs, kept)


BLOCKED = {"small CNN", "VGG", "functions", "wide maxima", "groups and sines", "squashed twice"}
"""Chains whose hidden values can have oneDNN's layout."""


HELD = {"one at a time": 1, "all at once": 2**30}


@pytest.mark.parametrize(("name", "piece", "networks_held"), covering(IMAGE_CHAINS, ["whole", "cut"], HELD, of=1))
def test_convolutions_lose_little_in_single_precision(
    name: str, piece: str, networks_held: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision, hidden values can have oneDNN's layout."""
    is_cut, held = piece == "cut", HELD[networks_held]
    monkeypatch.setattr("regauge.training.chains.image_chain.HELD_BYTES", held)
    if is_cut:
        monkeypatch.setattr("regauge.training.chains.image_chain.PIECE_BYTES", 500)
    module = IMAGE_CHAINS[name].double()
    networks = GROUPS * MEMBERS
    generator = torch.Generator().manual_seed(0)
    params = {
        key: torch.randn(networks, *tensor.shape, generator=generator) for key, tensor in module.state_dict().items()
    }
    inputs = torch.randn(GROUPS, BATCH, 2, 8, 8, generator=generator)
    targets = torch.randint(3, (GROUPS, BATCH), generator=generator)
    steps = steps_of(module, reads_vectors=False)
    assert steps is not None
    chain = ImageChain(steps)
    units = list(chain._units(params, inputs))
    assert len(units) == (networks if held == 1 else 1)
    assert units[0].batches[0][0].is_mkldnn == (library == "oneDNN" and name in BLOCKED)
    assert (len(units[0].batches[0]) > 1) == is_cut
    exact = ImageChain(steps)
    double = {key: tensor.double() for key, tensor in params.items()}
    losses, gradients = exact.gradients(double, inputs.double(), targets)
    found, derivatives = chain.gradients(params, inputs, targets)
    torch.testing.assert_close(found.double(), losses, rtol=1e-4, atol=1e-4)
    for key, gradient, other in zip(params, derivatives, gradients, strict=True):
        assert (gradient.dtype, gradient.layout) == (torch.float32, torch.strided)
        scale = float(other.abs().max())
        assert float((gradient - other).abs().max()) < 1e-4 * scale, key
    outputs = exact.outputs(double, inputs.double())
    torch.testing.assert_close(chain.outputs(params, inputs).double(), outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_what_overflows_is_as_in_the_module(value: float, library: str) -> None:
    """oneDNN's maxima and ReLU drop NaN. Therefore a network that diverges leaves its layout, without an effect on its
    neighbors.
    """
    module = IMAGE_CHAINS["VGG"].float()
    generator = torch.Generator().manual_seed(0)
    params = {key: torch.randn(3, *tensor.shape, generator=generator) for key, tensor in module.state_dict().items()}
    inputs = torch.randn(1, BATCH, 2, 8, 8, generator=generator)
    targets = torch.randint(3, (1, BATCH), generator=generator)
    steps = steps_of(module, reads_vectors=False)
    assert steps is not None
    chain = ImageChain(steps)
    losses, gradients = chain.gradients(params, inputs, targets)
    next(iter(params.values()))[1] *= value
    found, derivatives = chain.gradients(params, inputs, targets)
    assert not found[1].isfinite()
    assert not chain.outputs(params, inputs)[1].isfinite().any()
    assert torch.equal(found[::2], losses[::2])
    for gradient, other in zip(derivatives, gradients, strict=True):
        assert torch.equal(gradient[::2], other[::2])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_freed_memory_is_kept() -> None:
    """After a few steps, tensors of 40 MiB in all are no longer mapped again at each step."""
    import resource

    def faults(steps: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            [torch.ones(2**21) for _ in range(5)].clear()  # at once: glibc keeps 16 MiB without being asked
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    faults(10)
    assert faults(10) < 8 * 2**20 // resource.getpagesize()


def test_maxima_come_before_activations() -> None:
    """Nondecreasing functions are computed only for the largest values. A sine decreases, so it is not moved."""
    layers = (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))
    steps = steps_of(nn.Sequential(*layers), reads_vectors=False)
    assert steps is not None
    assert [type(step).__name__ for step in ImageChain(steps).steps] == [
        "Convolution", "MaxPooling", "Activation", "Activation", "Flattening", "Linear",
    ]  # fmt: skip
    steps = steps_of(Waves(), reads_vectors=False)
    assert steps is not None
    assert ImageChain(steps).steps == steps


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(192, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Flatten(), nn.Linear(192, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(108, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(4, ceil_mode=True), nn.Flatten(), nn.Linear(12, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Linear(36, 3)),
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(6, 3)),
        nn.Sequential(nn.Flatten(), nn.Conv2d(2, 3, 3)),
        Averaged(1, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_chain_of_images(module: nn.Module) -> None:
    assert steps_of(module, reads_vectors=False) is None
