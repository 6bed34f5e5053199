"""Training of matchers: a function that trains a matching method on a population, and its settings."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.core.arguments import check_arguments
from regauge.core.devices import to_device
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Batch as Examples
from regauge.core.task import Task, arguments
from regauge.learn.course import Trained, Validation
from regauge.learn.division import Division, FitArguments
from regauge.learn.fitting import Fitting
from regauge.learn.learn_configs import MatchingConfig
from regauge.learn.learned_matching import LearnedMatching
from regauge.learn.matching_losses import Copies, Losses, LossWeights, Siamese, batches_of
from regauge.learn.paired_gain import PairedGain
from regauge.learn.populations import (
    Indices,
    Parts,
    arrays_of,
    codes_of,
    digest,
    find_usable,
    modules_of,
    spread,
    to_net,
)
from regauge.learn.random_changes import change_values
from regauge.learn.soft_matching import relative_distances
from regauge.storage.collection import Collection, Networks
from regauge.storage.loader import Batch, Loader
from regauge.weightspace.heads.unit_features import UnitFeatures
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.probes.probes import Probes

EXCESS = "midpoint excess"
"""The loss at the midpoint between two networks minus the mean of the two networks' losses. The excess differs from the
barrier of the path."""
WEIGHTS, ALONE, SWEPT = "weight matching", "vectors alone", "vectors and sweeps"
"""Row names in the scores."""
SAMPLE = 256
"""The number of networks whose statistics standardize the inputs."""


@check_arguments
def fit_matching(
    population: Networks | Sequence[Networks] | Collection,
    symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    config: MatchingConfig | None = None,
    *,
    task: Task | Sequence[Task] | None = None,
    pair_by: str | None = None,
    module: nn.Module | Sequence[nn.Module] | None = None,
    inputs: Any = None,
    generator: torch.Generator | None = None,
    **arguments: Unpack[FitArguments],
) -> LearnedMatching:
    """Train a net that matches the units of networks, and keep the weights that are best on held-out pairs.

    The best weights have the least midpoint excess: the loss at the midpoint of two networks minus the mean of the
    networks' losses. The training needs no labels. With a task, the net learns to align networks such that the loss is
    low on the straight line between them. Without a task, the net learns to recognize the units of changed copies, and
    to make networks close. The matcher uses its net only if, on held-out pairs of a task, the net is better than weight
    matching by more than one standard error of the paired differences. If the net is not better on held-out pairs, the
    matcher uses weight matching instead. `about["verdict"]` reports the choice and the scores of net and weight
    matching. `about["gain"]` contains the difference of the scores.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or a list of populations and
            stores. All networks must have one architecture, but the numbers of units may differ.
        symmetry: The symmetry of the networks, or of each store and population; by default the symmetries of the
            stores.
        config: Settings. `seconds` limits only the training time, by the clock unless `is_cpu_time`.
        task: Model, data and loss, for the loss on the linear path and for the validation. For networks of several
            widths, give one task for each set of widths.
        pair_by: Column of the stores that restricts which networks are paired: both networks of a pair have the same
            value in this column. For example, the column may name the signal to which a network was fitted. By default,
            any two networks may be paired.
        module: The module that runs the networks on `probes`, or one for each set of widths; by default the module of
            the store.
        inputs: The initial probes: a tensor, a tuple of positional arguments, or a dictionary of keyword arguments.
        generator: The random generator from which one seed is sampled; by default a generator with seed 0.
        arguments: `indices`, `split`, `split_by`, `checkpoints`, `state` and `progress`; see
            `regauge.learn.division.FitArguments`. Stores are split by `pair_by` if `split_by` names no column.

    Raises:
        IndexError: An index is out of range.
        KeyError: The stores have no column `pair_by`.
        ValueError: There are too few networks, or networks of several architectures. The error is also raised if an
            argument that the settings need is missing. The error is also raised if the training diverged.
    """
    config, collection = config or MatchingConfig(), Collection(population, symmetry)
    usable = find_usable(collection, **arguments)
    if len(usable) < 3:
        raise ValueError(
            f"{len(usable)} networks are too few for a matcher, which needs networks for training, validation and "
            "tests: at least one of each, and hundreds to be useful"
        )
    division = Division.of(collection, generator, usable, by=pair_by, **arguments)
    tasks = [task] if isinstance(task, Task) else [] if task is None else list(task)
    return MatchingFitting.prepare(division, config, tasks, pair_by, module, inputs).fit(arguments)


@dataclass(frozen=True, eq=False)
class Partners:
    """A choice of partners for networks. Partners have the same tensor shapes and, if a column is given, the same entry
    in this column.

    Attributes:
        collection: The networks.
        codes: An integer for each network that identifies its value in the column, `[networks]`; None if there is no
            column.
        train: The training networks.
    """

    collection: Collection
    codes: NDArray[np.int64] | None
    train: Indices

    @classmethod
    def of(cls, collection: Collection, column: str | None, parts: Parts) -> "Partners":
        """Return partners by a column of the stores. Without a column, any two networks are partners.

        Raises:
            KeyError: The stores have no column with the name `column`.
            ValueError: In the training, validation or test split, no two networks have the same value.
        """
        codes = None if column is None else codes_of(collection.column(column))
        made = cls(collection, codes, parts["train"])
        for name, part in parts.items():
            if codes is not None and not len(made.with_partner(part)):
                raise ValueError(
                    f"no two networks for {name} have the same value of {column!r}; take more networks, or "
                    "another column"
                )
        return made

    def with_partner(self, indices: Indices) -> Indices:
        """Select the networks that have a partner among the given networks."""
        if self.codes is None:
            return indices
        codes, counts = np.unique(self._keys(indices), return_counts=True)
        return indices[np.isin(self._keys(indices), codes[counts > 1])]

    def draw(self, indices: Indices, chance: torch.Generator) -> Indices:
        """Return a random training partner of each network, with the same value in the column."""
        known = self._by_code
        drawn = []
        for index, code in zip(indices.tolist(), self._keys(indices).tolist(), strict=True):
            others = [other for other in known[code] if other != index]
            drawn.append(others[int(torch.randint(len(others), (), generator=chance))])
        return np.array(drawn, np.int64)

    def pairs(self, parts: Parts, part: str, most: int, *, step: int = 1) -> dict[int, tuple[Indices, Indices]]:
        """Return pairs of networks in a split.

        A single network gets a training network as partner. The partner of a network is the network `step` positions
        later, or the next network if the split is too small.
        """
        own = self.with_partner(parts[part])
        result = {}
        for layout in np.unique(self.collection.layout_of(own)).tolist():
            here = own[self.collection.layout_of(own) == layout]
            if self.codes is not None:
                here = here[np.argsort(self._keys(here), kind="stable")]
                keys = self._keys(here)
                far = [(k, np.flatnonzero(keys[k:] == keys[:-k])) for k in (step, 1)]
                own_step, same = next(one for one in far if len(one[1]) or one[0] == 1)
                left, right = here[same], here[same + own_step]
            elif len(here) > 1:
                left, right = here, np.roll(here, -step if len(here) > 2 * step else -1)
            else:
                others = self.train[self.collection.layout_of(self.train) == layout]
                left, right = here, others[:1]
            chosen = spread(np.arange(len(left)), most)
            result[layout] = left[chosen], right[chosen]
        return result

    def _keys(self, indices: Indices) -> NDArray[np.int64]:
        """Return the code of each network; networks with different layouts have different codes."""
        assert self.codes is not None
        return self.codes[indices] * (max(self.collection.layouts) + 1) + self.collection.layout_of(indices)

    @cached_property
    def _by_code(self) -> dict[int, list[int]]:
        known: dict[int, list[int]] = {}
        for index, code in zip(self.train.tolist(), self._keys(self.train).tolist(), strict=True):
            known.setdefault(code, []).append(index)
        return known


@dataclass(frozen=True, eq=False)
class MatchingFitting(Fitting[LearnedMatching]):
    """The training of a matcher. `losses`, `batches` and `known` have one entry per layout."""

    division: Division
    config: MatchingConfig
    net: Siamese
    loader: Loader
    losses: Sequence[Losses]
    batches: Sequence[Sequence[Examples]]
    partners: Partners
    known: Mapping[str, str | None]

    @classmethod
    def prepare(
        cls,
        division: Division,
        config: MatchingConfig,
        tasks: Sequence[Task],
        pair_by: str | None,
        module: nn.Module | Sequence[nn.Module] | None,
        inputs: Any,
    ) -> "MatchingFitting":
        """Return a training run with a new net, its data and its losses."""
        collection = division.collection
        layouts = range(max(collection.layouts) + 1)
        if tasks and len(tasks) != len(layouts):
            raise ValueError(
                f"{len(tasks)} tasks were given for networks of {len(layouts)} layouts; give one for each, in the "
                "order of the stores"
            )
        if not tasks and not (config.supervised or config.distance):
            raise ValueError("the loss on the line needs a `task`, and the other losses have no weight; give a task")
        partners = Partners.of(collection, pair_by, division.parts)
        train = partners.with_partner(division.parts["train"])
        samples = division.samples(SAMPLE, train)
        modules: Sequence[nn.Module] = modules_of(collection, module) if config.probes else ()
        if config.probes and inputs is None:
            raise ValueError("`probes` are initialized with inputs of the networks; give `inputs`")
        symmetries = [collection.symmetry(k).bind(sample) for k, sample in zip(layouts, samples, strict=True)]
        net = Metanet(
            symmetries[0],
            layer=config.layer,
            head=UnitFeatures(config.vectors),
            width=config.width,
            depth=config.depth,
            values=config.values,
            parts=config.parts,
            probes=Probes(modules[0], *arguments(inputs), config.probes) if config.probes else None,
            generator=division.chance("net"),
        )
        for k in layouts[1:]:
            net.adapt(symmetries[k], modules[k] if modules else None)
        net.standardize(samples[0])
        if not any(units.is_permuted for units in net.layout.units.values()):
            raise ValueError(
                "no group of this symmetry permutes units, so there is no order to learn; align these networks by "
                "WeightMatching"
            )
        siamese = Siamese(net).to(config.device)
        weights = LossWeights(config.supervised, config.line, config.distance)
        losses = [
            Losses(
                siamese,
                one,
                weights,
                tasks[k] if tasks else None,
                config.line_by,
                config.tolerance,
                config.max_iterations,
            )
            for k, one in enumerate(symmetries)
        ]
        batches = [batches_of(one) for one in tasks]
        known = {
            "inputs": None if inputs is None else digest(*arrays_of(inputs)),
            "task": digest(*(x for own in batches for batch in own[:1] for x in arrays_of(batch[0]))),
        }
        loader = division.loader(config.batch, train)
        return cls(division, config, siamese, loader, losses, batches, partners, known)

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """Return the mean loss of a batch."""
        config, losses = self.config, self.losses[batch.layout]
        net, symmetry = self.net.net, losses.symmetry
        params, second, copies = batch.params, None, None
        if config.supervised:
            changed, element = change_values(params, config.changes, symmetry.tied, chance), None
            if config.augment:
                element = symmetry.random(chance, config.augment, (len(batch.indices),))
                changed = symmetry.act(element, changed)
            copies = Copies(to_net(changed, net), element)
        if self.partners.codes is not None:
            second = to_net(self.division.collection.read(self.partners.draw(batch.indices, chance)), net)
        examples = None
        if self.batches and config.line:
            known = self.batches[batch.layout]
            examples = to_device(known[int(torch.randint(len(known), (), generator=chance))], config.device)
        return losses.step(to_net(params, net), second, copies, examples, chance)

    def validate(self) -> Validation:
        """Return the mean midpoint excess of held-out pairs, or their mean distance if there is no task."""
        facts = _means(self._measure("validation", LearnedMatching(self.net.net, sweeps=0)))
        found = {f"validation_{name}": value for name, value in facts.items() if name != "CPU ms"}
        order = (facts[EXCESS],) if EXCESS in facts else (facts["distance"],)
        return Validation(order, {**found, "sharpness": float(self.net.sharpness.detach())})

    def _measure(self, part: str, method: Method | None, *, step: int = 1) -> dict[str, Tensor]:
        """Align the pairs of a split. Return each pair's midpoint excess and relative distance, and the mean time in
        seconds.
        """
        excesses, distances, seconds = [], [], 0.0
        known = self.partners.pairs(self.division.parts, part, self.config.checked, step=step)
        for layout, (left, right) in known.items():
            losses = self.losses[layout]
            a, b = (self.division.collection.read(indices) for indices in (left, right))
            begun = time.process_time()
            moved = b if method is None else method.match(Problem(a, b, losses.symmetry)).params
            seconds += time.process_time() - begun
            names = [n for n in losses.symmetry.sites if n not in losses.symmetry.buffers and a[n].is_floating_point()]
            distances.append(relative_distances(*({n: one[n].double() for n in names} for one in (a, moved))))
            excess = losses.midpoint_excesses(a, moved)
            excesses += [] if excess is None else [excess.double()]
        found = {EXCESS: torch.cat(excesses)} if excesses else {}
        distance = torch.cat(distances)
        return {**found, "distance": distance, "CPU ms": torch.tensor([1000 * seconds / len(distance)])}

    def conclude(self, trained: Trained, progress: Progress) -> LearnedMatching:
        """Return the matcher with the best weights, with the scores of all methods on test pairs."""
        net = self.net.net.cpu().eval()
        learned = {ALONE: LearnedMatching(net, sweeps=0), SWEPT: LearnedMatching(net)}
        methods: dict[str, Method | None] = {"no alignment": None, WEIGHTS: WeightMatching(), **learned}
        advance = progress("scores", len(methods))
        with torch.no_grad():
            scores = {}
            for name, method in methods.items():
                scores[name] = _means(self._measure("test", method))
                advance(1)
            key = EXCESS if self.batches else "distance"
            # Other pairs than those by which the epoch was chosen.
            checked = {n: self._measure("validation", methods[n], step=2)[key] for n in (SWEPT, ALONE, WEIGHTS)}
        best = min(learned, key=lambda name: float(checked[name].mean()))
        gain = PairedGain.of(checked[best], checked[WEIGHTS])
        # Weight matching minimizes distances, which hardly predict the loss between two networks.
        is_left_out = bool(self.batches) and not gain.is_clear
        about = {
            "scores": scores,
            "verdict": _judge(key, float(checked[best].mean()), float(checked[WEIGHTS].mean()), gain),
            "is_better": not is_left_out if self.batches else None,
            "gain": gain.to_json(),
            **self.division.about(self.config),
            "steps": trained.history[-1]["step"],
            "seconds": trained.history[-1]["seconds"],
            "sharpness": float(self.net.sharpness.detach()),
            "course": [
                {"step": row["step"], "seconds": row["seconds"], key: row[f"validation_{key}"]}
                for row in trained.history
            ],
        }
        chosen = replace(learned[best], share=0.0) if is_left_out else learned[best]
        return replace(chosen, about=about, trained=trained)


def _means(measured: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each quantity over all pairs."""
    return {name: float(values.mean()) for name, values in measured.items()}


def _judge(key: str, own: float, weights: float, gain: PairedGain) -> str:
    """Return a message that states whether a matcher is better than weight matching on held-out pairs."""
    numbers = f"{key} {own:.3g} against {weights:.3g}, {gain} over {gain.count} pairs for validation"
    if key != EXCESS:
        return f"Whether the matcher is better than weight matching is unknown without a task ({numbers}); give one."
    if gain.is_clear:
        return f"The matcher is better than weight matching by more than the standard error: {numbers}."
    return (
        "The matcher is not better than weight matching by more than the standard error, so its net is not used "
        f"(share=0): {numbers}. More networks, a longer training or probes help. For ReLU networks, a task in the "
        "alignment also helps, because gradient descent on scales follows."
    )
