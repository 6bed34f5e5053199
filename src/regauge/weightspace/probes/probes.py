"""Probes: their settings, and the learned inputs with the maps from activations to features."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.outputs import Outputs
from regauge.weightspace.features import Features
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layout.characters import Character, at_end, is_odd
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.probes.output_reader import OutputReader
from regauge.weightspace.probes.probed import Probed
from regauge.weightspace.probes.readings import ProbeReading

PLAIN = (bool, int, float, str, type(None))
"""Types that arguments other than tensors may have."""


@dataclass(frozen=True, eq=False)
class Probes:
    """Inputs that a net learns and on which it evaluates the networks that it reads.

    Gradients reach the learned inputs through the evaluated networks.

    Activations at the probes become features of units. Activations are averaged over all axes except units and probes,
    for example over pixels and tokens. Outputs become features of the network. For any module, discovery finds which
    activations belong to which units, and a random element checks the assignment. Activations that belong to no unit,
    such as activations inside recurrent operators, are not used. Networks are evaluated in their canonical form, in the
    module's dtype. If layers have features that signs change, activations that signs change are added to these
    features.

    Floating-point inputs are learned. Probes are initialized to random examples. If there are fewer examples than
    probes, probes are sampled from a normal distribution with the mean and deviation of the examples. Other inputs,
    such as tokens and masks, are not learned, but copied from examples. An argument is copied unchanged if its first
    axis and the first axis of the first tensor differ in length.

    With an `Invariant` head, a separate MLP reads the outputs at all probes; see `Metanet.read_probes`. Probes may form
    a grid (`inputs=(16, 16)`), which is initialized with 256 examples in their order, such as the pixels of an image.
    For a grid, convolutions along the grid precede the MLP.

    If the module computes internally in single precision, as language models do, the features are exact only to single
    precision.

    Attributes:
        module: The module of the networks. The module's own parameters are not used.
        examples: Positional arguments of the module (see `discover`): a batch with examples along the first axis.
        kwargs: Keyword arguments of the module.
        inputs: The number of probes, or the lengths of the two or three axes of a grid of probes.
        outputs: The outputs of the module that are used; see `discover`.
        constant: Names of arguments (indices for positional arguments) whose first axis does not index examples,
            although it has one entry for each example.
        hidden: The width of the MLP on the outputs.
        dropout: The dropout probability of the MLP's hidden units in training.

    References:
        Kofinas et al. (2024), section 3.3, for the features of units; Kahana et al. (2025) for nets that read only
        outputs.
    """

    module: nn.Module
    examples: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs: int | tuple[int, ...] = 64
    outputs: Outputs = None
    constant: tuple[str, ...] = ()
    hidden: int = 512
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.sizes, default=0) < 1:
            raise ValueError(f"inputs={self.inputs}; at least one probe is needed, or leave out `probes`")
        if len(self.sizes) > 3:
            raise ValueError(f"inputs={self.inputs}; a sheet of probes has two or three axes; give as many")
        if self.hidden < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"hidden={self.hidden} and dropout={self.dropout} are invalid; hidden must be positive, and "
                "dropout in [0, 1)"
            )
        for name, x in self.arguments.items():
            if not isinstance(x, (Tensor, *PLAIN)):
                raise ValueError(
                    f"argument {name!r} of the probes' module is a {type(x).__name__}, but probes are tensors, and "
                    "other arguments numbers, texts or None; wrap the module in one that takes these"
                )
        if not self.per_example:
            raise ValueError("the examples hold no tensor with a row for each; give a batch of inputs of the module")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths of the grid's axes, or the number of probes if the probes form no grid."""
        return (self.inputs,) if isinstance(self.inputs, int) else tuple(self.inputs)

    @property
    def count(self) -> int:
        """The number of probes."""
        return math.prod(self.sizes)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the module by name, where positional arguments are named by their index."""
        return {**{f"{k}": x for k, x in enumerate(self.examples)}, **self.kwargs}

    @property
    def per_example(self) -> tuple[str, ...]:
        """Names of the tensors that have one row per example."""
        tensors = {
            name: x
            for name, x in self.arguments.items()
            if isinstance(x, Tensor) and x.ndim and len(x) and name not in self.constant
        }
        count = len(next(iter(tensors.values()), ()))
        return tuple(name for name, x in tensors.items() if len(x) == count)

    def draw(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Return all arguments of the module, with as many rows as there are probes."""
        given, wanted = self.arguments, self.count
        count = len(given[self.per_example[0]])
        if len(self.sizes) > 1:
            if count != wanted:
                raise ValueError(
                    f"a sheet of {self.sizes} probes is initialized with {wanted} examples, but there are {count}; "
                    "give one example for each probe"
                )
            return given
        has_enough = count >= wanted
        rows = (
            torch.randperm(count, generator=generator)[:wanted]
            if has_enough
            else torch.randint(count, (wanted,), generator=generator)
        )
        for name in self.per_example:
            x = given[name].detach()
            if has_enough or not x.is_floating_point():
                given[name] = x[rows.to(x.device)]
            else:
                deviation = float(x.double().std(correction=0)) or 1.0
                noise = torch.randn(wanted, *x.shape[1:], generator=generator)
                given[name] = (float(x.mean()) + deviation * noise).to(x)
        return given


class ProbeEncoder(nn.Module):
    """The learned inputs of one architecture, and the maps from activations and outputs to features.

    If `width` is not given, only outputs are read, and no features are computed. If `answers` is given, a separate net
    computes `answers` predictions from the outputs.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        probes: Probes,
        layout: Layout,
        width: int | None,
        answers: int | None,
        *,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.probes = probes
        drawn = probes.draw(generator)
        self.learned, self.plain = nn.ParameterDict(), {}
        for name, x in drawn.items():
            if name in probes.per_example and x.is_floating_point():
                self.learned[name] = nn.Parameter(x.clone())
            elif isinstance(x, Tensor):
                self.register_buffer(f"given_{name}", x.detach().clone())
            else:
                self.plain[name] = x
        self.reads_units = width is not None
        self.probed = self.trace(probes.module, layout)
        with torch.no_grad():
            state = {name: tensor.detach().unsqueeze(0) for name, tensor in probes.module.state_dict().items()}
            numbers = self.probed.run(state, self.inputs)[1].shape[1]
        readings = self.probed.readings
        share = Counter(reading.units for reading in readings)
        self.signs = [_sign(reading, layout) for reading in readings]
        self.register_buffer("mean", torch.zeros(len(readings) + 1))
        self.register_buffer("std", torch.ones(len(readings) + 1))
        self.maps = nn.ModuleList()
        if width is not None:
            self.maps.extend(
                Dense(
                    r.channels,
                    width,
                    is_biased=not is_odd(sign),
                    gain=1 / math.sqrt(share[r.units]),
                    generator=generator,
                )
                for r, sign in zip(readings, self.signs, strict=True)
            )
            self.outputs = Dense(numbers, width, generator=generator)
        self.reader = None if answers is None else self._make_reader(numbers, answers, generator)

    @property
    def inputs(self) -> dict[str, Any]:
        """All arguments with which the module is called, in their order."""
        known = {**self.learned, **self.plain}
        return {
            name: known[name] if name in known else self.get_buffer(f"given_{name}") for name in self.probes.arguments
        }

    def describe(self) -> dict[str, Any]:
        """Return the settings of the probes, without their module, as plain data for JSON.

        The net itself stores the tensors of the probes.

        Raises:
            ValueError: A function selects the outputs.
        """
        probes = self.probes
        if callable(probes.outputs):
            raise ValueError(
                "a function chooses the outputs of the probes' module, which a file cannot store; name the outputs, or "
                "wrap the module in one that returns them alone"
            )
        return {
            "arguments": [[name, self.plain.get(name)] for name in probes.arguments],
            "constant": [name for name in probes.arguments if name not in probes.per_example],
            "inputs": probes.inputs if isinstance(probes.inputs, int) else list(probes.inputs),
            "hidden": probes.hidden,
            "dropout": probes.dropout,
            "outputs": probes.outputs,
        }

    def trace(self, module: nn.Module, layout: Layout) -> Probed:
        """Trace the evaluation of networks of one layout on the probes."""
        return Probed.of(
            module,
            layout,
            {name: x.detach() if isinstance(x, Tensor) else x for name, x in self.inputs.items()},
            self.probes.per_example,
            count=self.probes.count,
            outputs=self.probes.outputs,
            reads_units=self.reads_units,
        )

    @torch.no_grad()
    def standardize(self, params: Mapping[str, Tensor], probed: Probed) -> None:
        """Set the means and deviations of the units' activations and of the outputs, measured over networks, units and
        probes.
        """
        read, outputs = probed.run(params, self.inputs)
        for k, values in enumerate([*read, outputs]):
            self.mean[k] = values.double().mean()
            self.std[k] = float(values.double().std(correction=0)) or 1.0

    def answer(self, params: Mapping[str, Tensor], probed: Probed) -> Tensor:
        """Return predictions from the networks' outputs at the probes: `[models, answers]`."""
        outputs = probed.run(params, self.inputs, reads_units=False)[1]
        assert self.reader is not None
        made: Tensor = self.reader(self._standard(outputs, -1))
        return made

    def forward(self, features: Features, params: Mapping[str, Tensor], probed: Probed) -> Features:
        read, outputs = probed.run(params, self.inputs)
        units, odd = dict(features.units), {name: dict(known) for name, known in features.odd.units.items()}
        for k, (reading, sign, values) in enumerate(zip(probed.readings, self.signs, read, strict=True)):
            if is_odd(sign):
                size = (self.mean[k].square() + self.std[k].square()).sqrt()
                known = odd[reading.units]
                known[sign] = known[sign] + self.maps[k](values.to(self.mean) / size)
            else:
                units[reading.units] = units[reading.units] + self.maps[k](self._standard(values, k))
        network = features.network + self.outputs(self._standard(outputs, -1))
        return features.change(units, features.pairs, network, replace(features.odd, units=odd))

    def _make_reader(self, numbers: int, answers: int, generator: torch.Generator | None) -> OutputReader:
        probes = self.probes
        has_places = all(along is not None for _, along in self.probed.outputs)
        if len(probes.sizes) > 1 and not has_places:
            raise ValueError(
                f"the outputs of the module have no axis for the {probes.count} probes, so they form no sheet; give "
                "only the number of probes"
            )
        channels, sizes = (numbers // probes.count, probes.sizes) if has_places else (1, (numbers,))
        return OutputReader(sizes, channels, probes.hidden, answers, probes.dropout, generator=generator)

    def _standard(self, values: Tensor, k: int) -> Tensor:
        return (values.to(self.mean) - self.mean[k]) / self.std[k]


def _sign(reading: ProbeReading, layout: Layout) -> Character:
    """Return the exponents of the signs that multiply some activations of units. All exponents are zero if signs are
    canonicalized.
    """
    return at_end(layout.character_of(reading.piece.labels), reading.end)
