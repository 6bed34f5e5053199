"""Architectures whose networks are read by nets: populations of each architecture, and their symmetries."""

from collections.abc import Callable
from functools import cache

import models
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.nets.resnet import resnet20
from regauge.weightspace.layout.compile import Layout

NAMES = (
    "mlp_relu",
    "mlp_linear",
    "siren",
    "cnn_flatten",
    "resnet8_batch_A",
    "resnet8_group_B",
    "lstm",
    "grouped_conv",
    "depthwise_conv",
    "depthwise_multiplier",
    "tied_autoencoder",
    "concatenation",
    "vit",
    "hf_gpt2",
    "hf_llama",
    "hf_mixtral",
)
"""Names of cases in `models.CASES` and `SHALLOW`."""
SHALLOW: dict[str, Callable[[], nn.Module]] = {
    "resnet8_batch_A": lambda: resnet20(shortcut="A", blocks=1),
    "resnet8_group_B": lambda: resnet20(norm="group", blocks=1),
}
"""Residual networks with one block per stage: they have the kinds of tensors of deeper networks, and take a third of
the time."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def symmetry(name: str) -> rg.Symmetry:
    """Return the symmetry of a case."""
    return _found(name)[0]


def population(name: str, networks: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Params:
    """Return random networks of a case, without the common properties of initializations."""
    found, start = _found(name)
    chance = generator(seed)
    result: Params = {}
    for key, tensor in start.items():
        if not tensor.is_floating_point():
            result[key] = tensor.expand(networks, *tensor.shape)
            continue
        noise = 0.3 * torch.randn(networks, *tensor.shape, generator=chance, dtype=torch.float64)
        moved = tensor.double() + noise
        result[key] = (moved.abs() + 0.1 if key.endswith("running_var") else moved).to(dtype)
    for names in found.tied:
        result.update({key: result[names[0]] for key in names if key in result})
    return result


def find_case(name: str) -> models.Case:
    """Return the case of a name in `NAMES`."""
    if name in SHALLOW:
        return models.Case(name, SHALLOW[name], models.IMAGE, "")
    return next(case for case in models.CASES if case.name == name)


@cache
def _found(name: str) -> tuple[rg.Symmetry, Params]:
    case = find_case(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = case.module().eval()
        found = models.symmetry_of(case) if name not in SHALLOW else rg.discover(module, case.inputs())
    return found, {key: tensor.detach() for key, tensor in module.state_dict().items()}


def move_units(layout: Layout, name: str, element: Element, values: Tensor) -> Tensor:
    """Return features of one set of units, `[models, *sizes, width]`, permuted by a batched element."""
    units = layout.units[name]
    models_, ndim = len(values), len(units.axes)

    def along(axis: int, size: int) -> Tensor:
        return torch.arange(size).reshape([-1 if k == axis else 1 for k in range(1 + ndim)])

    index = [along(0, models_)]
    for k, group in enumerate(units.axes):
        perm = element[group].perm
        if perm is None:
            index.append(along(1 + k, units.sizes[k]))
            continue
        bases = [units.axes.index(base) for base in layout.symmetry[group].within]
        key = (along(0, models_), *(along(1 + base, units.sizes[base]) for base in bases), along(1 + k, units.sizes[k]))
        index.append(perm[key])
    return values[tuple(index)]


def move_changes(case: str, element: Element, before: Params, after: Params) -> tuple[Params, Params]:
    """Return changes of networks, transformed by an element, and the changes of the transformed networks, without
    rounding.
    """
    networks = population(case)
    changed = {name: tensor + before.get(name, 0) for name, tensor in networks.items()}
    one, other = (symmetry(case).act(element, params) for params in (changed, networks))
    moved = {name: one[name] - other[name] for name in before}
    size = max(float(tensor.detach().abs().max()) for tensor in moved.values() if tensor.numel())
    found = [{name: t.where(t.abs() > 1e-12 * size, 0) for name, t in made.items()} for made in (moved, after)]
    return found[0], found[1]
