"""The method Smooth, which makes large activations smaller, and weights larger, by scales fitted on data."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regauge.core.act import act
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.scales import Direction, ScaleSite, directions
from regauge.core.symmetry import Symmetry
from regauge.discovery.activations import Activations, activations
from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem
from regauge.gauging.methods.equalize import NO_SCALES, Units, diagonal, scaled_element, unit_sizes
from regauge.gauging.moves import Move
from regauge.gauging.result import Chosen
from regauge.gauging.rounding import FOUR_BITS, RoundToNearest, decibels, layer_rows

LARGEST_FACTOR = 1e4
"""The largest allowed factor of a unit, relative to the mean factor."""


@dataclass(frozen=True)
class Smooth(GaugeMethod):
    """Scales between activations and the weights that read them: SmoothQuant and AWQ for any architecture.

    Families of positive scales act on layer inputs, such as outputs of norms, attention values, hidden units and
    channels. For each family, activations are divided by `s = a^alpha / w^beta`, up to a common factor. The weights
    that read the activations are multiplied by s. Here a is the size of each unit's activations, and w is the largest
    weight that reads the unit. The method tries several values of alpha on a grid. The method keeps the value of alpha
    for which rounding the weights changes the outputs of the layers least. If every value of alpha increases the change
    of the outputs, the family is not scaled. The symmetry contains all layers that read the same activations, including
    routers and shared experts. Therefore scales are never moved across an operation that would change the function.

    With default arguments, `Smooth` searches in the same way as AWQ. `Smooth(alpha=0.5, statistic="max",
    is_against_weights=True)` is SmoothQuant.

    The objective is a signal-to-noise ratio in dB, averaged over families. The ratio is measured on the outputs of
    layers for the first batch of the task.

    Attributes:
        scheme: The rounding scheme for weights.
        activations: The rounding scheme for activations when values of alpha are compared. Each token or example has
            its own scale. If None, activations are not rounded.
        alpha: The exponent alpha. If None, the method searches for the best value.
        grid: The number of equal intervals between zero and one. The method tries the endpoints of all intervals as
            alpha.
        statistic: The measure of activation size: the mean or the largest magnitude.
        is_against_weights: Whether `beta = 1 - alpha`; otherwise, beta is zero.

    References:
        Xiao et al. (2023), SmoothQuant, equation 4; Lin et al. (2023), AWQ, section 3.2.
    """

    label = "smoothed"

    scheme: RoundToNearest = FOUR_BITS
    activations: RoundToNearest | None = None
    alpha: float | None = None
    grid: int = 20
    statistic: Literal["mean", "max"] = "mean"
    is_against_weights: bool = False

    needs_task = True

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ValueError(
                f"alpha is {self.alpha}, but it is an exponent from 0 to 1, or None to search for it; choose one"
            )
        if self.grid < 1:
            raise ValueError(f"grid is {self.grid}, but one exponent or more are tried; give one at least")

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return the factors of all families, chosen one after the other."""
        work = _Work(self, problem)
        fixed: list[tuple[str, str]] = []
        steps: list[tuple[Direction, Units]] = []
        gains: list[tuple[float, float]] = []
        for direction in directions(diagonal(problem.symmetry), "keep"):
            pair = work.pair(direction)
            if isinstance(pair, str):
                fixed.append((direction.group, pair))
                continue
            logs, before, after = work.search(pair)
            gains.append((before, after))
            if after > before:
                steps.append((direction, logs))
                work.move(direction, logs)
            else:
                fixed.append((direction.group, "no tried exponent reduces the rounding error of its layers"))
        fixed += [(group.name, NO_SCALES) for group in diagonal(problem.symmetry).groups if not group.scales]
        moves = (Move(problem.symmetry, scaled_element(problem.symmetry.identity(), steps)),)
        count = max(len(gains), 1)
        history = [sum(before for before, _ in gains) / count]
        for before, after in gains:
            history.append(max(history[-1], history[-1] + (after - before) / count))
        return Chosen(moves, history[-1], history[0], tuple(history), "dB", tuple(dict.fromkeys(fixed)))


@dataclass(frozen=True)
class _Pair:
    """A family of scales, with the activations that it scales, the weights that read them, and the layers' outputs."""

    direction: Direction
    values: tuple[ScaleSite, ...]
    readers: tuple[ScaleSite, ...]
    products: tuple[str, ...]


class _Work:
    """A network to which factors are applied family by family, in float32."""

    def __init__(self, method: Smooth, problem: GaugeProblem) -> None:
        assert problem.task is not None
        self._method, self._symmetry = method, problem.symmetry
        inputs, kwargs = problem.inputs
        self._inputs, self._kwargs = pytree.tree_map_only(Tensor, _single, (inputs, kwargs))
        module = copy.deepcopy(problem.task.module).float()
        self._params: Params = {name: _single(tensor) for name, tensor in problem.params.items()}
        for names in self._symmetry.tied:
            known = next((name for name in names if name in self._params), None)
            self._params |= {} if known is None else dict.fromkeys(names, self._params[known])
        self._found: Activations = activations(
            module, self._inputs, self._symmetry, self._kwargs, outputs=problem.task.outputs
        )
        self._by_family = {(d.group, d.weights): d for d in directions(diagonal(self._found.symmetry), "keep")}
        self._rows = layer_rows(self._symmetry)
        self._schemes: dict[tuple[int, ...], Any] = {}

    def pair(self, direction: Direction) -> _Pair | str:
        """Return the activations and reading weights of a family, or the reason why the family is not scaled."""
        there = self._by_family.get((direction.group, direction.weights))
        read = {*self._found.read}
        values = tuple(place for place in there.places if place.name in read) if there is not None else ()
        if not values:
            return "no layer reads what it scales"
        if len({place.exponent for place in values}) > 1:
            return "layers read it with several exponents"
        readers = tuple(
            place
            for place in direction.places
            if place.name in self._rows and (place.name, place.axes[-1]) in self._symmetry.readers
            if place.exponent == -values[0].exponent
        )
        products = self._found.intermediate.products({place.name for place in readers})
        if not readers or not products:
            return "no weights of a layer read it"
        return _Pair(direction, values, readers, products)

    def search(self, pair: _Pair) -> tuple[Units, float, float]:
        """Return the best factors, and the signal-to-noise ratios without and with these factors."""
        method, count = self._method, pair.direction.count
        names = [*dict.fromkeys(place.name for place in pair.values)]
        known = self._run(self._params, [*names, *pair.products])
        reference = [known[name] for name in pair.products]
        how: Literal["amax", "mean"] = "amax" if method.statistic == "max" else "mean"
        each = [unit_sizes(place, known[place.name].abs(), count, how) for place in pair.values]
        sizes = _logs(torch.stack(each).amax(0))
        weights = _logs(torch.stack([unit_sizes(p, self._params[p.name].abs(), count) for p in pair.readers]).amax(0))
        best, before = torch.zeros(count, dtype=torch.float64), self._ratio(pair, None, reference)
        reached = before
        alphas = [k / method.grid for k in range(method.grid + 1)] if method.alpha is None else [method.alpha]
        for alpha in alphas:
            logs = alpha * sizes - (1 - alpha) * weights if method.is_against_weights else alpha * sizes
            logs = (logs - logs.mean()).clamp(-_limit(), _limit()) / -(pair.values[0].exponent / 2)
            ratio = self._ratio(pair, logs, reference)
            if ratio > reached:
                best, reached = logs, ratio
        return best, before, reached

    def move(self, direction: Direction, logs: Units) -> None:
        """Apply the factors of a family to the network."""
        self._params = self._moved(self._params, direction, logs)

    def _ratio(self, pair: _Pair, logs: Units | None, reference: list[Tensor]) -> float:
        """Return the signal-to-noise ratio of the layers' outputs with rounded weights, for given factors."""
        params = self._params if logs is None else self._moved(self._params, pair.direction, logs)
        names = {place.name for place in pair.readers}
        rounded = {name: self._method.scheme(params[name], self._rows[name]) for name in names}
        changes = {place.name: self._change(place) for place in pair.values} if self._method.activations else {}
        made = self._run({**params, **rounded}, pair.products, changes)
        shares = []
        for name, whole in zip(pair.products, reference, strict=True):
            noise = float((made[name] - whole).double().square().sum())
            shares.append(noise / max(float(whole.double().square().sum()), 1e-30))
        return decibels(sum(shares) / len(shares))

    def _change(self, place: ScaleSite) -> Any:
        """Return the rounding of activations, with one scale for each token (if units are on the last axis) or for each
        example.
        """
        ndim = len(self._found.symmetry.shapes[place.name])
        rows = tuple(range(ndim - 1)) if place.axes[-1] == ndim - 1 else (0,)
        scheme = self._method.activations
        assert scheme is not None
        return self._schemes.setdefault(rows, lambda values: scheme(values, rows))

    def _run(self, params: Mapping[str, Tensor], names: Any, changes: Any = None) -> dict[str, Tensor]:
        with torch.no_grad():
            return self._found.intermediate.run(params, self._inputs, self._kwargs, names, changes)

    def _moved(self, params: Params, direction: Direction, logs: Units) -> Params:
        element = scaled_element(self._symmetry.identity(), [(direction, logs)])
        return _act_on(self._symmetry, element, params, {place.name for place in direction.places})


def _act_on(symmetry: Symmetry, element: Element, params: Params, names: set[str]) -> Params:
    sites = {name: symmetry.sites[name] for name in names}
    moved = act(symmetry.groups, sites, element, {n: params[n] for n in names}, {n: params[n].ndim for n in names})
    return {**params, **moved}


def _single(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.is_floating_point() else tensor


def _logs(sizes: Units) -> Units:
    """Return logarithms of sizes. Units of size zero get the mean of all other units."""
    is_there = sizes > 0
    logs = torch.where(is_there, sizes, 1.0).log()
    mean = logs[is_there].mean() if bool(is_there.any()) else torch.zeros((), dtype=logs.dtype)
    return torch.where(is_there, logs, mean)


def _limit() -> float:
    return float(torch.tensor(LARGEST_FACTOR).log())
