"""Training of matchers: the settings, and one function from a population to a method."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.core.arguments import check_arguments
from regauge.core.devices import to_device
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Batch as Examples
from regauge.core.task import Task, arguments
from regauge.learn.changes import Change, Dropout, Noise, Pruning, change_values
from regauge.learn.learned_matching import LearnedMatching
from regauge.learn.matching_losses import Copies, LineKind, Losses, Siamese, Weights, batches_of
from regauge.learn.partners import Partners
from regauge.learn.populations import (
    Parts,
    arrays_of,
    describe_run,
    digest,
    find_usable,
    kept_unless,
    modules_of,
    split_networks,
    spread,
    to_net,
)
from regauge.learn.soft_matching import relative_distances
from regauge.learn.training import Trained, Training, Validation, train
from regauge.storage.collection import Collection, Kept, Networks
from regauge.storage.loader import Batch, Loader
from regauge.training.settings import derive_seed
from regauge.weightspace.encoder import Values
from regauge.weightspace.heads import UnitFeatures
from regauge.weightspace.layers import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.probes import Probes

EXCESS = "midpoint excess"
"""The loss halfway between two networks above the mean of both: no barrier, which is the highest point of a line."""
SAMPLE = 256
"""Networks by which values are standardized."""


@dataclass(frozen=True, kw_only=True)
class MatchingConfig(Training):
    """Settings of a matcher: its net, its losses, and its training.

    Attributes:
        layer: Settings of the net's layers; see `regauge.weightspace.LAYERS`.
        width: The width of the net.
        depth: Number of layers.
        vectors: Length of the vectors by which units are matched.
        values: The encoding of single values; standardized unless given.
        parts: What the net respects by construction; everything that it can unless given.
        probes: Number of learned inputs that the net runs the networks on; zero for none.
        supervised: Weight of recognizing the units of a changed copy, by cross entropy. Copies need no permutation:
            the net respects it by construction, so that the loss would be the same.
        line: Weight of what a task says at a random point between two networks, the second of which is moved by soft
            plans; nothing without a task.
        line_by: "loss" lowers the task's loss there. "outputs" lowers the mean squared difference between the outputs
            there and the mix of both networks' outputs, for networks that compute different functions: of a task's
            batches only the inputs are used.
        distance: Weight of the distance between the two, as a share of their squared norms.
        changes: Random changes of copies.
        augment: Parts of the random elements of the symmetry that move copies, for what the net does not respect.
        max_iterations: Most Sinkhorn iterations of a plan.
        tolerance: Largest error of the sums of a plan's rows.
        checked: Most pairs of networks that are aligned for validation, and for the scores at the end.

    References:
        Navon et al. (2024), section 4.2. Departures: a network and the next one of a batch are a pair, so that each is
        read once; plans are relative to the element that the vectors choose, so that scales, signs, half periods and
        matrices are matched, too; the distance is relative; the temperature of plans is bounded.
    """

    layer: Layer = field(default_factory=lambda: Propagation(channels=2))
    width: int = 64
    depth: int = 3
    vectors: int = 128
    values: Values | None = None
    parts: tuple[str, ...] | None = None
    probes: int = 0
    supervised: float = 0.1
    line: float = 1.0
    line_by: LineKind = "loss"
    distance: float = 0.1
    changes: tuple[Change, ...] = (Noise(0.1), Dropout(0.05), Pruning(0.1))
    augment: tuple[str, ...] = ()
    max_iterations: int = 50
    tolerance: float = 1e-3
    checked: int = 32
    batch: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.supervised, self.line, self.distance)
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(
                f"supervised={self.supervised}, line={self.line}, distance={self.distance}: weights of losses are at "
                "least 0, and one of them is positive"
            )
        if self.probes < 0 or self.max_iterations < 1 or not self.tolerance > 0 or self.checked < 1:
            raise ValueError(
                f"probes={self.probes}, max_iterations={self.max_iterations}, tolerance={self.tolerance}, "
                f"checked={self.checked}: all are positive, and probes may be 0 for none"
            )
        if moving := [change for change in self.changes if change.moves_inputs]:
            raise ValueError(f"{moving[0]} changes what units compute, and copies are to be recognized; leave it out")


@check_arguments
def fit_matching(
    population: Networks | Sequence[Networks] | Collection,
    symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    config: MatchingConfig | None = None,
    *,
    task: Task | Sequence[Task] | None = None,
    generator: torch.Generator,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    checkpoints: Kept = "last",
    pair_by: str | None = None,
    module: nn.Module | Sequence[nn.Module] | None = None,
    inputs: Any = None,
    state: Path | None = None,
    progress: Progress = no_progress,
) -> LearnedMatching:
    """Train a net to match the units of networks; the weights with the least midpoint excess on held-out pairs stay.

    Nothing needs labels. With a task the net learns to align networks such that the loss is low on the straight line
    between them; without one, to recognize changed copies and to bring networks close.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or several, of one
            architecture with any numbers of units.
        symmetry: The symmetry of the networks, or of each store and population; those of the stores unless given.
        config: Settings; `seconds` limits the training alone.
        task: Model, data and loss, for the loss on the line and for the validation; for networks of several widths one
            for each layout.
        generator: The source of all chance, from which one number is drawn.
        indices: Numbers of the networks to use, or a mask.
        split: Numbers of the networks for "train", "validation" and "test". Unless given, 80%, 10% and 10%, a store by
            run, or as its column "split" says.
        split_by: Column by which stores are divided instead of by run.
        checkpoints: Of each run of a store "last", its last checkpoint, or "all"; where neither `indices` nor `split`
            names networks.
        pair_by: Column of the stores that names what networks have in common: partners have the same value there, such
            as several networks that were fitted to one signal. Any two networks are partners unless given.
        module: Runs the networks, for `probes`, for each layout; that of the store unless given.
        inputs: What probes begin as: a tensor, a tuple of positional or a mapping of keyword arguments.
        state: File in which the training is kept while it runs, and from which the same call continues.
        progress: Shows the steps.

    Raises:
        IndexError: There is no network of some number.
        KeyError: There is no such column.
        ValueError: There are too few networks, they are of several architectures, something is missing that the
            settings need, or the training diverged.
    """
    config = config or MatchingConfig()
    collection = Collection(population, symmetry)
    usable = find_usable(collection, indices, kept_unless(split, checkpoints))
    if len(usable) < 3:
        raise ValueError(
            f"{len(usable)} networks cannot train a matcher, which needs some to learn from, for validation and for "
            "tests: at least one of each, and hundreds to be useful"
        )
    parts = split_networks(collection, usable, split, split_by or pair_by)
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    tasks = [task] if isinstance(task, Task) else [] if task is None else list(task)
    fitting = _Fitting.prepare(collection, parts, config, seed, tasks, pair_by, module, inputs)
    trained = train(
        fitting.siamese,
        fitting.loader,
        fitting.loss,
        fitting.validate,
        config,
        seed=seed,
        state=state,
        inputs=describe_run(
            config,
            collection,
            parts,
            seed,
            inputs=None if inputs is None else digest(*arrays_of(inputs)),
            task=digest(*(x for one in tasks for batch in batches_of(one)[:1] for x in arrays_of(batch[0]))),
        ),
        progress=progress,
    )
    return fitting.conclude(trained, generator.initial_seed(), progress)


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Everything that a training needs; `tasks` and `losses` are those of each layout."""

    collection: Collection
    parts: Parts
    config: MatchingConfig
    seed: int
    siamese: Siamese
    loader: Loader
    losses: Sequence[Losses]
    batches: Sequence[Sequence[Examples]]
    partners: Partners

    @classmethod
    def prepare(
        cls,
        collection: Collection,
        parts: Parts,
        config: MatchingConfig,
        seed: int,
        tasks: Sequence[Task],
        pair_by: str | None,
        module: nn.Module | Sequence[nn.Module] | None,
        inputs: Any,
    ) -> "_Fitting":
        """Make the net and everything around it."""
        layouts = range(max(collection.layouts) + 1)
        if tasks and len(tasks) != len(layouts):
            raise ValueError(
                f"{len(tasks)} tasks were given for networks of {len(layouts)} layouts; give one for each, in the "
                "order of the stores"
            )
        if not tasks and not (config.supervised or config.distance):
            raise ValueError("the loss on the line needs a `task`, and other losses have no weight; give one")
        partners = Partners.of(collection, pair_by, parts)
        train = partners.with_partner(parts["train"])
        there = collection.layout_of(train)
        if missing := [k for k in layouts if not (there == k).any()]:
            raise ValueError(
                f"none of the networks for training has the architecture of store or population "
                f"{collection.first(missing[0]) + 1}; take more of its networks, or leave it out"
            )
        modules: Sequence[nn.Module] = modules_of(collection, module) if config.probes else ()
        if config.probes and inputs is None:
            raise ValueError("`probes` begin as some inputs of the networks; give `inputs`")
        samples = [collection.read(spread(train[there == k], SAMPLE)) for k in layouts]
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
            generator=torch.Generator().manual_seed(derive_seed(seed, "net")),
        )
        for k in layouts[1:]:
            net.adapt(symmetries[k], modules[k] if modules else None)
        net.standardize(samples[0])
        if not any(units.is_permuted for units in net.layout.units.values()):
            raise ValueError(
                "no group of this symmetry permutes units, so that nothing can be learned about which belong together; "
                "align these networks by WeightMatching"
            )
        siamese = Siamese(net).to(config.device)
        weights = Weights(config.supervised, config.line, config.distance)
        loader = Loader(
            collection,
            generator=torch.Generator().manual_seed(derive_seed(seed, "order")),
            batch=config.batch,
            indices=train,
        )
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
        return cls(collection, parts, config, seed, siamese, loader, losses, batches, partners)

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """The mean loss of a batch."""
        config, losses = self.config, self.losses[batch.layout]
        net, symmetry = self.siamese.net, losses.symmetry
        params, second, copies = batch.params, None, None
        if config.supervised:
            changed, element = change_values(params, config.changes, symmetry.tied, chance), None
            if config.augment:
                element = symmetry.random(chance, config.augment, (len(batch.indices),))
                changed = symmetry.act(element, changed)
            copies = Copies(to_net(changed, net), element)
        if self.partners.codes is not None:
            second = to_net(self.collection.read(self.partners.draw(batch.indices, chance)), net)
        examples = None
        if self.batches and config.line:
            known = self.batches[batch.layout]
            examples = to_device(known[int(torch.randint(len(known), (), generator=chance))], config.device)
        return losses.step(to_net(params, net), second, copies, examples, chance)

    def validate(self) -> Validation:
        """The midpoint excess of held-out pairs, or without a task their distance."""
        facts = self._measure("validation", LearnedMatching(self.siamese.net, sweeps=0))
        found = {f"validation_{name}": value for name, value in facts.items() if name != "CPU ms"}
        order = (facts[EXCESS],) if EXCESS in facts else (facts["distance"],)
        return Validation(order, {**found, "sharpness": float(self.siamese.sharpness.detach())})

    def _measure(self, part: str, method: Method | None) -> dict[str, float]:
        """Mean midpoint excess, relative squared distance and time of the pairs of a part, aligned by a method."""
        excesses, distances, seconds = [], [], 0.0
        for layout, (left, right) in self.partners.pairs(self.parts, part, self.config.checked).items():
            losses = self.losses[layout]
            a, b = (self.collection.read(indices) for indices in (left, right))
            begun = time.process_time()
            moved = b if method is None else method.match(Problem(a, b, losses.symmetry)).params
            seconds += time.process_time() - begun
            names = [n for n in losses.symmetry.sites if n not in losses.symmetry.buffers and a[n].is_floating_point()]
            distances.append(relative_distances(*({n: one[n].double() for n in names} for one in (a, moved))))
            found = losses.midpoint_excesses(a, moved)
            excesses += [] if found is None else [found.double()]
        known = {EXCESS: float(torch.cat(excesses).mean())} if excesses else {}
        distance = torch.cat(distances)
        return {**known, "distance": float(distance.mean()), "CPU ms": 1000 * seconds / len(distance)}

    def conclude(self, trained: Trained, given: int, progress: Progress) -> LearnedMatching:
        """The matcher, with the sweeps that the validation likes better, scores of test pairs, and the given seed."""
        net = self.siamese.net.cpu().eval()
        methods: dict[str, Method | None] = {
            "no alignment": None,
            "weight matching": WeightMatching(),
            "vectors alone": LearnedMatching(net, sweeps=0),
            "vectors and sweeps": LearnedMatching(net),
        }
        advance = progress("scores", len(methods))
        with torch.no_grad():
            scores = {}
            for name, method in methods.items():
                scores[name] = self._measure("test", method)
                advance(1)
            key = EXCESS if self.batches else "distance"
            tried = {sweeps: LearnedMatching(net, sweeps=sweeps) for sweeps in (2, 0)}
            checked = {sweeps: self._measure("validation", one)[key] for sweeps, one in tried.items()}
        about = {
            "scores": scores,
            "networks": {name: len(part) for name, part in self.parts.items()},
            "settings": repr(self.config),
            "seed": given,
            "steps": trained.history[-1]["step"],
            "seconds": trained.history[-1]["seconds"],
            "sharpness": float(self.siamese.sharpness.detach()),
            "course": [
                {"step": row["step"], "seconds": row["seconds"], key: row[f"validation_{key}"]}
                for row in trained.history
            ],
        }
        return LearnedMatching(net, sweeps=min(checked, key=checked.__getitem__), about=about, trained=trained)
