"""A fitted flow: sampling, densities, and files."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.checkpoints.writing import save
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.flow.alignment import align_points, sort_points
from regauge.flow.choosing import ChosenNetworks, require_fit
from regauge.flow.components import Components
from regauge.flow.design import describe_design
from regauge.flow.flow_config import Design
from regauge.flow.likelihood import integrate_density
from regauge.flow.manifold import Manifold, Points
from regauge.flow.moments import Moments
from regauge.flow.nets import OverNetworks
from regauge.flow.priors import Prior
from regauge.flow.resizing import find_places
from regauge.flow.sampling import Field, Guidance, Solver, diffuse, follow_thesis, integrate
from regauge.flow.space import LOG_NORM, Space
from regauge.flow.velocity import Velocity
from regauge.learn.course import Trained
from regauge.storage.architecture import Architecture

SAMPLED_AT_ONCE = 256
"""The number of networks that are sampled at a time."""


KIND, VERSION = "regauge flow", "3"
PRIOR = ("mean", "deviation", "root")
"""Names of a prior's tensors in files."""
COMPONENTS = ("mean", "unit", "axes", "sizes")
"""Names under which files store the tensors of principal components, except the square roots of covariances."""


@dataclass(frozen=True, eq=False)
class Flow:
    """A generative model of networks, which samples networks and computes their densities.

        flow.sample(100, generator=generator)     # networks with a leading model axis
        flow.log_density(population)              # [models], nats

    Attributes:
        velocity: The velocity: a closed form plus the output of a net.
        space: The space of points that represent networks: a `Space`, or the principal `Components` of a `Space`.
        prior: The distribution of the start points of samples.
        moments: Statistics of the networks to which the flow was fitted.
        design: The settings from which the flow is built.
        classes: The values of the label column, empty without labels. `sample` can sample networks for one label value.
        about: Facts about the training run, as JSON.
        trained: The training history; None if the flow was loaded from a file.
        reference: The point in the space `networks` to which networks are aligned, `[values]`; None if the fit did not
            align networks.
    """

    velocity: Velocity
    space: Space | Components
    prior: Prior
    moments: Moments
    design: Design
    classes: tuple[Any, ...]
    about: Mapping[str, Any]
    trained: Trained | None = None
    reference: Float[Tensor, " values"] | None = None

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of the networks, if the flow was fitted to a store; otherwise None."""
        text = self.about.get("architecture")
        return None if text is None else Architecture.from_json(text)

    @property
    def networks(self) -> Space:
        """The space of all parameters of networks, even if the flow itself uses principal components."""
        return self.space.networks if isinstance(self.space, Components) else self.space

    def told(self, **facts: Any) -> "Flow":
        """Return a copy of the flow with further entries in `about`. The entries must be JSON values."""
        return replace(self, about={**self.about, **facts})

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the flow to a `.safetensors` file, atomically. The header contains the flow's settings.

        Raises:
            FileExistsError: The file exists and `overwrite` is false.
            FileNotFoundError: The folder of `path` does not exist.
            OSError: The disk is full.
            ValueError: The name does not end in `.safetensors`.
        """
        few = self.space if isinstance(self.space, Components) else None
        space = self.networks
        made = {
            "design": describe_design(self.design),
            "symmetry": json.loads(space.symmetry.to_json()),
            "names": [name for name in space.names if name != LOG_NORM],
            "positive": list(space.positive),
            "classes": list(self.classes),
        }
        tensors = {f"velocity/{name}": tensor for name, tensor in self.velocity.state_dict().items()}
        tensors |= {f"moments/{name}": tensor for name, tensor in vars(self.moments).items() if name != "covariance"}
        tensors |= {f"prior/{name}": getattr(self.prior, name) for name in PRIOR}
        if self.prior.covariance is not None:
            tensors |= {f"covariance/{name}": tensor for name, tensor in vars(self.prior.covariance).items()}
        tensors |= {f"constants/{name}": tensor for name, tensor in space.constants.items()}
        if few is not None:
            tensors |= {f"components/{name}": getattr(few, name) for name in COMPONENTS}
            tensors |= {f"components/roots/{number:05d}": root for number, root in enumerate(few.roots)}
        if self.reference is not None:
            tensors["reference"] = self.reference
        header = {"kind": KIND, "version": VERSION, "flow": json.dumps(made), "about": json.dumps(dict(self.about))}
        return save(tensors, path, overwrite=overwrite, metadata=header)

    def resize(self, symmetry: Symmetry) -> "Flow":
        """Return the flow for networks with other numbers of units. Additional units have the same distribution as the
        original units.

        Raises:
            ValueError: The networks differ in more than the numbers of units. The error is also raised if the flow was
                fitted to aligned networks, whose units have fixed positions.
        """
        net = self.velocity.net
        if self.design.is_aligned or not isinstance(net, OverNetworks) or isinstance(self.space, Components):
            raise ValueError(
                "this flow was fitted to aligned networks, so the numbers of units are fixed; fit a flow without "
                "alignment to sample networks of other widths"
            )
        space = self.space.resize(symmetry)
        places = find_places(self.space, space)
        names = ("mean", "deviation", "root")
        moments = replace(self.moments, **{name: getattr(self.moments, name)[places] for name in names})
        prior = replace(self.prior, space=space, **{name: getattr(self.prior, name)[places] for name in names})
        velocity = copy.deepcopy(self.velocity)
        velocity.resize(space, places)
        return replace(self, velocity=velocity, space=space, prior=prior, moments=moments)

    @check_arguments
    @torch.no_grad()
    def sample(
        self,
        count: int,
        *,
        generator: torch.Generator | None = None,
        steps: int = 50,
        solver: Solver | Literal["thesis"] = "heun",
        noise: float = 0.0,
        guidance: Guidance | None = None,
        label: Any = None,
        start: Mapping[str, Tensor] | None = None,
        task: Task | None = None,
        keep: float = 0.1,
        moves: int = 50,
    ) -> Params:
        """Sample networks on the device of `velocity`. To sample on a GPU, call `flow.velocity.cuda()` first.

        Random numbers are generated on the CPU, so all devices give the same networks up to rounding.

        If a task is given, `count / keep` networks are sampled. The networks with the smallest loss on the task are
        kept, in sampling order. Next, random steps on the start points of the kept networks are tried, and steps that
        lower the loss are accepted; see `ChosenNetworks.move`. Selecting samples needs no gradient, and hardly reduces
        the diversity or the novelty of the samples.

        Args:
            count: The number of networks.
            generator: The random generator. Default: a generator with seed 0.
            steps: The number of solver steps.
            solver: See `integrate`. With noise, the solver is Euler-Maruyama. "thesis" is the sampler of
                `follow_thesis`, for flows that predict endpoints. The sampler of the thesis does not solve the flow's
                equation.
            noise: The amount of noise; see `diffuse`, or `follow_thesis`.
            guidance: A guidance loss for the samples.
            label: One of `classes`, for a flow with labels.
            start: Networks from which the paths start, instead of random start points.
            task: Examples and the loss by which networks are selected. Pass training examples, not the examples on
                which the samples are evaluated later.
            keep: The share of the sampled networks that is returned.
            moves: The number of random steps that are tried for each kept network; 0 for none. Each step costs one
                sample and one evaluation of the loss.

        Raises:
            TypeError: `task` is not a task.
            ValueError: The label does not exist. `keep` is not a share. The task has another architecture, or is
                combined with `start`. Noise is requested, but the start points and endpoints of the flow were coupled.
                The error is also raised if the solver "thesis" is requested for a flow that predicts velocities, or
                with guidance.
        """
        generator = given_or_seed(generator)
        if count < 1:
            raise ValueError(f"count={count}, but must be at least 1")
        if not 0 < keep <= 1 or moves < 0 or (task is not None and start is not None):
            raise ValueError(
                f"keep={keep} is a share of drawn networks, above 0 and at most 1, and none of given starts; "
                f"moves={moves} are not negative"
            )
        if solver == "thesis" and (self.design.predicts != "end" or guidance is not None):
            raise ValueError(
                "the solver 'thesis' is only for flows with predicts='end', without guidance; choose another solver"
            )
        if noise and solver != "thesis" and not self.design.coupling.is_independent:
            raise ValueError(
                "noise needs the gradient of the log density, which this flow does not have, because its starts and "
                "ends were coupled; choose noise=0, or fit a flow without coupling"
            )
        number = self._number(label)

        def make(x0: Points) -> Params:
            return self._carry(x0.to(self._device), steps, solver, noise, guidance, number, generator)

        if task is None:
            x0 = self.prior.sample(count, generator) if start is None else self.space.enter(start)
            parts = [make(part) for part in torch.split(x0, SAMPLED_AT_ONCE)]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        require_fit(task, self.networks.symmetry)
        drawn = torch.randn(math.ceil(count / keep), self.space.dim, generator=generator, dtype=torch.float64)
        chosen = ChosenNetworks.of(task, lambda values: make(self.prior.place(values).float()), drawn, count)
        chosen.move(moves, generator)
        return chosen.networks

    def draw_starts(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Sample networks from the prior, the distribution of start points, with a leading model axis."""
        generator = given_or_seed(generator)
        return self._space(count, generator).leave(self.prior.sample(count, generator))

    def log_density(
        self,
        population: Mapping[str, Tensor],
        *,
        steps: int = 50,
        probes: int | None = 8,
        label: Any = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, " models"]:
        """Return the log density of networks in nats, which is equal for all networks of an orbit.

        The computation uses the device of `velocity`. The density is evaluated at one point of each network's orbit:
        the network with the scales of the space, aligned to the reference of the fit. If the flow was not fitted to
        aligned networks, the units are sorted instead of aligned. The result is a density with respect to surface area
        on spheres and volume in Euclidean coordinates. The result is not a density over functions or over all
        parameters. The density depends on the representation of networks. Compare a density only with the densities of
        other networks under the same flow. If `scales="keep"`, networks that differ by scales or translations have
        different densities. A flow of principal components returns only the density of the components.

        Args:
            population: Networks with a leading model axis. The result has the precision of the networks.
            steps: The number of steps of the Runge-Kutta method.
            probes: The number of random vectors that estimate divergences. All networks use the same vectors. If
                `probes` is None, divergences are exact, and each coordinate costs one backward pass.
            label: One of `classes`, for a flow with labels.
            generator: The random generator of the probes. By default, the probes are fixed.
        """
        own = next(self.velocity.parameters()).dtype
        dtypes = (t.dtype for t in population.values() if t.is_floating_point())
        dtype = reduce(torch.promote_types, dtypes, own)
        flow = self if dtype == own else replace(self, velocity=copy.deepcopy(self.velocity).to(dtype))
        field, x = flow.field(self._number(label)), self._find_points(population).to(self._device, dtype)
        signs = None
        if probes is not None:
            chance = given_or_seed(generator)
            signs = 2 * torch.randint(0, 2, (probes, x.shape[1]), generator=chance, dtype=torch.int8) - 1
        found = []
        for k in range(0, len(x), SAMPLED_AT_ONCE):
            x0, change = integrate_density(self.space, field, x[k : k + SAMPLED_AT_ONCE], steps=steps, probes=signs)
            found.append(self.prior.log_density(x0) + change)
        return torch.cat(found)

    @property
    def _device(self) -> torch.device:
        return next(self.velocity.parameters()).device

    def _find_points(self, population: Mapping[str, Tensor]) -> Points:
        """Return the points of networks, with one point for each orbit. The points are computed in the same way as for
        the fit.
        """
        x = self.networks.enter(population, torch.float64)
        if self.reference is None:
            x = sort_points(self.networks, x)
        else:
            x = align_points(self.networks, self.reference.to(x), x)
        return self.space.reduce(x) if isinstance(self.space, Components) else x

    def field(self, number: int | None = None) -> Field:
        """Return the velocity as a function of points and times, for one class label."""

        def at(x: Points, t: Tensor) -> Points:
            labels = None if number is None else torch.full((len(x),), number, device=x.device)
            found: Tensor = self.velocity(x, t, labels)
            return found

        return at

    def _space(self, count: int, generator: torch.Generator) -> Manifold:
        """Return the space for `count` networks. If the space has components, the residuals are random."""
        return self.space.with_rest(count, generator) if isinstance(self.space, Components) else self.space

    def _number(self, label: Any) -> int | None:
        if (label is None) != (not self.classes) or (self.classes and label not in self.classes):
            raise ValueError(f"there is no label {label!r}; this flow has {list(self.classes) or 'no labels'}")
        return None if label is None else self.classes.index(label)

    def _carry(
        self,
        x: Points,
        steps: int,
        solver: Solver | Literal["thesis"],
        noise: float,
        guidance: Guidance | None,
        number: int | None,
        generator: torch.Generator,
    ) -> Params:
        field, space = self.field(number), self._space(len(x), generator)

        def predict_end(y: Points, t: Tensor) -> Points:
            labels = None if number is None else torch.full((len(y),), number, device=y.device)
            return self.velocity.predict_end(y, t, labels)

        if solver == "thesis":
            return space.leave(follow_thesis(predict_end, x, steps=steps, noise=noise, generator=generator))
        if guidance is not None:
            field = guidance.field(space, field, predict_end)
        if noise:
            x = diffuse(space, field, x, steps=steps, noise=noise, start=self.prior, generator=generator)
        else:
            x = integrate(space, field, x, steps=steps, solver=solver)
        return space.leave(x)
