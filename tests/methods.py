"""Every public method with settings, and networks for matching."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from symmetries import drawn, generator
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Symmetry
from regauge.alignment import METHODS, Method
from regauge.alignment.joint import role_symmetry


def two_students(seed: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Symmetry, Params, Params, rg.Task]:
    """Return two networks that fit the same teacher, and their task."""
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    symmetry = rg.discover(module, (torch.zeros(1, 3, dtype=dtype),), verify=False)
    a = drawn(symmetry, seed, dtype)
    moved = symmetry.act(symmetry.random(generator(seed), ("permutation", "sign", "linear")), a)
    b = {n: t + 0.2 * drawn(symmetry, seed + 1, dtype)[n] for n, t in moved.items()}
    inputs = torch.randn((40, 3), generator=generator(seed), dtype=torch.float64).to(dtype)
    targets = torch.func.functional_call(module, a, (inputs,)).detach()
    batches = list(zip(inputs.split(10), targets.split(10), strict=True))
    return module, symmetry, a, b, rg.Task(module, batches, nn.functional.mse_loss)


class Parameters(rg.Task):
    """A task without a model: the outputs of a network are its parameters."""

    def run(self, params: Mapping[str, Tensor], inputs: object) -> Tensor:
        return torch.cat([params[name].flatten() for name in sorted(params)])


def distance_task(target: Params) -> rg.Task:
    """Return the mean squared distance from a network as a task, for methods that descend on a loss under any
    symmetry.
    """
    task = Parameters(nn.Identity(), [], nn.functional.mse_loss)
    return replace(task, batches=[(torch.zeros(1), task.run(target, None))])


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Heads(nn.Module):
    """Attention with two heads of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 3)).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        mixed: Tensor = self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return mixed


MODULES: dict[str, Callable[[], nn.Module]] = {
    "permutation": lambda: mlp(nn.GELU()),
    "scaled": lambda: mlp(nn.ReLU()),
    "signed": lambda: mlp(nn.Tanh()),
    "dihedral": lambda: mlp(Sine()),
    "linear": lambda: mlp(nn.Identity()),
    "nested": lambda: Heads(),
}
"""Modules that contain every kind of group that is possible with an input of 6 features."""


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), activation, nn.Linear(9, 2))


@cache
def module_case(name: str) -> tuple[nn.Module, Tensor, Symmetry]:
    """Return a module, its inputs and its symmetry, in float64."""
    torch.manual_seed(0)
    module = MODULES[name]().double().eval()
    inputs = torch.randn(5, 4, 6, dtype=torch.float64) if name == "nested" else torch.randn(40, 6, dtype=torch.float64)
    return module, inputs, rg.discover(module, (inputs[:3],))


def outputs(module: nn.Module, params: Params, inputs: Tensor) -> Tensor:
    return torch.func.functional_call(module, params, (inputs,))


def teacher_task(module: nn.Module, params: Params, inputs: Tensor) -> rg.Task:
    """Return the task of reproducing the outputs of a network."""
    batches = [(x, outputs(module, params, x).detach()) for x in inputs.split(len(inputs) // 2)]
    return rg.Task(module, batches, nn.functional.mse_loss)


EVERY: dict[str, Method] = {
    "weights": rg.WeightMatching(),
    "weights as they are": rg.WeightMatching(scales="keep", start="identity"),
    "weights from many starts": rg.WeightMatching(restarts=2),
    "activations": rg.ActivationMatching(),
    "activations by covariance": rg.ActivationMatching(statistic="covariance"),
    "activations by product": rg.ActivationMatching(statistic="product", scales="keep"),
    "mixed": rg.alignment.MixedMatching(),
    "frank-wolfe": rg.FrankWolfe(max_steps=5),
    "frank-wolfe from many starts": rg.FrankWolfe(max_steps=3, restarts=1, scales="keep"),
    "straight-through": rg.StraightThrough(steps=4, every=2),
    "sinkhorn": rg.Sinkhorn(steps=4, every=2),
    "sinkhorn on the distance": rg.Sinkhorn(loss="l2", init=None, steps=4, every=2),
    "sinkhorn on the line": rg.Sinkhorn(loss="random", steps=4, every=2),
    "continuous descent": rg.ContinuousDescent(init=rg.WeightMatching(), steps=4, every=2),
    "best of two": rg.alignment.BestOf((rg.WeightMatching(), rg.FrankWolfe(max_steps=2))),
    "merge many": rg.alignment.MergeMany(),
    "merge many at once": rg.alignment.MergeMany(core=2),
    "merge many from many starts": rg.alignment.MergeMany(restarts=2, max_rounds=3),
    "gaussians": rg.GaussianMatching(),
    "gaussians by divergence": rg.GaussianMatching(cost="symmetric kl"),
    "three dictionaries": rg.alignment.JointMatching(
        ("parameters", "magnitudes", "parameters"), weights=(1.0, 0.5, 0.0)
    ),
}
"""Every public method with settings that make it fast. Methods that are not listed have their default settings."""
EVERY |= {
    name: row.load()() for name, row in METHODS.items() if row.load() not in {type(method) for method in EVERY.values()}
}
CHANCE = (
    "weights from many starts",
    "frank-wolfe from many starts",
    "merge many from many starts",
)
"""Methods that need a generator."""


def needs_data(method: Method) -> bool:
    row = next(row for row in METHODS.values() if row.load() is type(method))
    return row.needs_data and not (row.without_data and row.without_data.items() <= vars(method).items())


def reads_activations(method: Method) -> bool:
    """Return whether the method needs the task of a module with the symmetry."""
    inner = [one for value in vars(method).values() for one in (value if isinstance(value, tuple) else (value,))]
    matching = (rg.ActivationMatching, rg.alignment.MixedMatching)
    return isinstance(method, matching) or any(reads_activations(one) for one in inner if isinstance(one, Method))


def task_for(method: Method, target: Params) -> rg.Task | None:
    return distance_task(target) if needs_data(method) else None


def network_for(method: Method, params: Params) -> Any:
    """Return a network in the form that the method accepts: unchanged, or a tuple of dictionaries."""
    if not method.joint_roles:
        return params
    parts = [params, *({n: t.roll(k) for n, t in params.items()} for k in range(1, len(method.joint_roles)))]
    roles = zip(method.joint_roles, parts, strict=True)
    return tuple(p if role == "parameters" else {n: _size(t) for n, t in p.items()} for role, p in roles)


def _size(tensor: Tensor) -> Tensor:
    """Return the absolute values of numbers. Booleans do not change."""
    return tensor if tensor.dtype == torch.bool else tensor.abs() + 0.1


def moved_by(method: Method, symmetry: Symmetry, element: rg.Element, network: Any) -> Any:
    """Return the network transformed by an element, where the role of each dictionary determines its transformation."""
    if not method.joint_roles:
        return symmetry.act(element, network)
    roles = zip(method.joint_roles, network, strict=True)
    return tuple(role_symmetry(symmetry, role, params).act(element, params) for role, params in roles)


def tensors_of(network: Any) -> dict[str, Tensor]:
    """Return all tensors of a network or of a tuple of dictionaries."""
    if isinstance(network, tuple):
        return {f"{k}/{name}": tensor for k, params in enumerate(network) for name, tensor in params.items()}
    return dict(network)


def are_close(a: Any, b: Any, atol: float = 1e-9) -> bool:
    a, b = tensors_of(a), tensors_of(b)
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=0, atol=atol) for n in a)


def are_equal(a: Any, b: Any) -> bool:
    a, b = tensors_of(a), tensors_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
