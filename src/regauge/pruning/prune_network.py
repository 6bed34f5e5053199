"""The function `prune`, which removes the units that a network does not need, and then the least important units."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.canonical.canonicalize import canonicalize
from regauge.checkpoints.job import Network as Given
from regauge.checkpoints.job import open_call, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.core.arguments import check_arguments
from regauge.core.balance import balance, has_balance
from regauge.core.given import require_instance
from regauge.core.groups import Group
from regauge.core.params import Params, require_finite, round_to
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, choose_and_try_to_judge
from regauge.pruning.criteria import Criterion, Magnitude, OutputError
from regauge.pruning.exact import Removal, apply_removals, find_removals
from regauge.pruning.network import Network
from regauge.pruning.prune_report import Configuration, write_pruned
from regauge.pruning.pruned import PruneCertificate, Pruned
from regauge.pruning.representative import join_again, take_representative
from regauge.pruning.resized_module import Accept, resize, shared_sizes
from regauge.pruning.slices import cut_coordinates, cut_params, cut_symmetry

ROUNDS = 8
"""The largest number of searches for unneeded units. Removing some units can make other units unneeded."""
MIXED = "a matrix mixes its units, so single units cannot be removed; a share for a linear group reduces its rank"
NORMED = (
    "a norm over its units, or a fixed size in the model: without some units, the others would compute another function"
)

WITHOUT_DATA = (
    "units were removed by their magnitude. With data, those units are removed that others can replace, and the next "
    "weights are fitted, which usually loses far less"
)

Build = Callable[[Params, Symmetry, Accept], nn.Module]
"""A function that builds a module from smaller tensors and their symmetry, or raises a ValueError."""


@check_arguments
@with_files
def prune(
    params: Given,
    symmetry: Symmetry,
    *,
    share: float | Mapping[str, float] = 0.0,
    criterion: Criterion | None = None,
    task: Task | None = None,
    test: Task | None = None,
    generator: torch.Generator | None = None,
    alike: Sequence[Sequence[str]] = (),
    build: Build | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
) -> Pruned:
    """Remove units of groups (hidden units, channels, heads, experts) from every tensor on which the group acts.

    First, `prune` removes units that the network does not need, without changing its function. A network does not need
    units that no layer reads, constant units, and duplicates of other units. The values of constant units are added to
    the biases of the layers that read the units. Duplicates are merged with the unit that they duplicate. Each removal
    is checked by comparing outputs in float64, and is undone if the check fails. After the exact removals, the
    criterion removes units until the requested share of each group is removed. Units are found and removed in the
    network without translations and gains, its representative (`Symmetry.split`). Afterwards, the translations and
    gains are restored. If two networks differ only by a translation, the pruned networks therefore also differ only by
    a translation.

    Args:
        params: One network, as parameters by name or the path of a checkpoint. The network is not modified.
        symmetry: The symmetry of its architecture.
        share: The share of each group's units that are removed in total, from 0 to below 1, or a share by group name. A
            single number does not cut linear groups, or groups over whose units a norm is computed. To cut a linear or
            normalized group, give its share by name. A linear group loses the directions with the smallest singular
            values.
        criterion: The criterion. By default, `OutputError()` with a task and `Magnitude()` without a task; see
            `regauge.pruning`.
        task: The model and data. Removals are checked on the inputs of the first batch. Without a task, the network is
            not evaluated, nothing is checked, and no exact removals are made.
        test: The task on which losses are measured. By default, if the criterion uses data, half of the examples of
            `task` are held out (`Task.split`). If examples cannot be split, criteria and losses use all examples.
        generator: The random generator, for criteria that need one.
        alike: Sets of groups that must keep equal numbers of units, because one configuration value sets all of their
            sizes.
        build: A function that builds a module with the smaller sizes, for models whose sizes are set elsewhere, such as
            in a configuration. By default, a copy of the task's module is resized. If `build` has methods `files` and
            `changes`, the files and the changed configuration values are also written.
        out: The path or `Output` for the smaller network, if the network is a checkpoint. A report is written next to
            the output.
        memory: The memory limit for a checkpoint: bytes, or a string such as "2GB". By default, half of the machine's
            memory. The parameters in float64 must fit within the limit.

    Returns:
        The smaller network, its symmetry, a module for it, the removed units, and the certificate.

    Raises:
        KeyError: There is no group with the given name, or a parameter is missing.
        ValueError: A share is not from 0 to below 1, or a group cannot be cut. The parameters do not fit the symmetry
            or are not finite. The criterion needs a task or a generator. The error is also raised if no module with the
            new sizes computes the right outputs.

    References:
        Fang et al. (2023), DepGraph: Towards any structural pruning, for removals in all layers at once.
    """
    has_data = task is not None and task.has_targets
    notes = (WITHOUT_DATA,) if criterion is None and not has_data and _is_any(share) else ()
    criterion = (OutputError() if has_data else Magnitude()) if criterion is None else criterion
    require_instance(criterion, Criterion, "criterion", {"magnitude": "regauge.pruning.Magnitude()"})
    settings = {"share": share, "criterion": repr(criterion)}
    ways: Any = {"symmetry": symmetry, "generator": generator, "work": "pruning"}
    job = open_call("rg.prune", settings, {"checkpoint": params}, out=out, memory=memory, **ways)
    if job is not None:
        job.require_memory()
        params = job.source.params
    assert isinstance(params, Mapping)
    bound = symmetry.bind(params)
    for name in bound.sites:
        if name in params and params[name].ndim != len(bound.shapes[name]):
            raise ValueError(f"{name!r} has a leading model axis; prune the networks of a population one by one")
    if task is None and criterion.needs_task:
        raise ValueError(f"{type(criterion).__name__} needs data: give a task with a module and batches")
    if generator is None and criterion.needs_generator:
        raise ValueError(f"{type(criterion).__name__} chooses units at random: give a generator")
    if task is None and test is not None:
        raise ValueError("test measures the result of a choice by a task: give task, too")
    require_finite(params, "the network", bound.structure)
    shares = _shares(share, bound)
    if task is not None and criterion.needs_task and any(shares.values()):
        task, test = choose_and_try_to_judge(task, test)
    judging = task if test is None else test
    judging = None if judging is None or not judging.has_targets else judging
    network = Network(params, bound, task)
    sets = [tuple(names) for names in alike] or ([] if task is None else shared_sizes(task.module, bound))
    for names in sets:
        if len({bound[name].size for name in names}) > 1:
            raise ValueError(
                f"groups {list(names)[:3]} must keep equal numbers of units, but have different sizes; give each group "
                "its own share"
            )
    sets += [(group.name,) for group in bound.groups if not any(group.name in names for names in sets)]
    reference = given = network.run(network.params) if task is not None else []
    coordinates = take_representative(network)
    named = frozenset(share) if isinstance(share, Mapping) else frozenset[str]()
    work = _Work(network, params, coordinates, sets, build, named=named)
    work.choose_groups()
    exact: tuple[Removal, ...] = ()
    if task is not None:
        exact = work.remove_exactly(reference)
    change = network.change(reference, network.run(network.params)) if task is not None else 0.0
    first_losses = {} if judging is None else work.losses(judging)
    work.remove_by(criterion, shares, generator)
    result = work.finish(exact, change, given)
    if task is not None and judging is not None and result.module is not None:
        last = replace(judging, module=result.module).evaluate(result.params)
        data = (task.name or repr(task), judging.name or repr(judging))
        result = replace(result, losses={**first_losses, "at the end": last}, data=data)
    result = replace(result, notes=(*result.notes, *notes))
    if job is not None and job.out is not None:
        write_pruned(job, result, criterion, share, build if isinstance(build, Configuration) else None)
    return result


def _is_any(share: float | Mapping[str, float]) -> bool:
    return any(share.values()) if isinstance(share, Mapping) else share > 0


def _shares(share: float | Mapping[str, float], symmetry: Symmetry) -> dict[str, float]:
    named = dict(share) if isinstance(share, Mapping) else {group.name: share for group in symmetry.groups}
    for name, value in named.items():
        symmetry[name]
        if not 0 <= value < 1:
            raise ValueError(f"the share of {name!r} is {value}; it is from 0 to below 1: some unit must stay")
    return {name: float(value) for name, value in named.items()}


@dataclass
class _Work:
    """The state of pruning: the network, the groups that are cut, and their removed units."""

    network: Network
    given: Mapping[str, Tensor]
    coordinates: Mapping[str, Tensor]
    sets: Sequence[tuple[str, ...]]
    build: Build | None
    named: frozenset[str]
    fixed: list[tuple[str, str]] = field(default_factory=list)
    free: list[tuple[str, ...]] = field(default_factory=list)
    normed: list[tuple[str, ...]] = field(default_factory=list)
    gone: dict[str, Tensor] = field(default_factory=dict)

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the given network."""
        return self.network.symmetry

    def losses(self, task: Task) -> dict[str, dict[str, float]]:
        """Return the task's metrics for the given network and for the current network."""
        now = self._as_given(join_again(self.network.params, self.coordinates, self.given, self.symmetry))
        return {"as it was": task.evaluate(self.given), "exact removals": task.evaluate(now)}

    def choose_groups(self) -> None:
        """Find the groups that can be cut: removing a unit that no layer reads must not change the function."""
        trials: list[tuple[str, ...]] = []
        for names in self.sets:
            reason = next((found for name in names if (found := self._obstacle(self.symmetry[name]))), "")
            if reason:
                self.fixed += [(name, reason) for name in names]
            else:
                trials.append(names)
        reasons: dict[tuple[str, ...], str] = {}
        self.free = trials if self.network.task is None else self._pass(trials, reasons)
        for names, reason in reasons.items():
            if self.named & {*names}:
                self.normed.append(names)
            else:
                self.fixed += [(name, reason) for name in names]
        for names in self.free + self.normed:
            for name in names:
                count = self.symmetry.count_copies(name)
                self.gone[name] = torch.zeros(count, self.symmetry[name].size, dtype=torch.bool)
        refused = [name for name, _ in self.fixed if name in self.named]
        if refused:
            raise ValueError(f"group {refused[0]!r} cannot be cut: {dict(self.fixed)[refused[0]]}; leave it out")

    def _obstacle(self, group: Group) -> str:
        if group.matrix != "none" and not (group.matrix == "linear" and group.name in self.named):
            return MIXED
        if group.matrix == "none" and not group.is_permuted:
            return "its units have a fixed order"
        return "" if group.size > 1 else "it has a single unit"

    def _pass(self, sets: list[tuple[str, ...]], reasons: dict[tuple[str, ...], str]) -> list[tuple[str, ...]]:
        """Find by bisection the sets of groups that can be cut. For all other sets, store the reason in `reasons`."""
        if not sets:
            return []
        trial = self.network.fork()
        gone = {}
        for name in (name for names in sets for name in names):
            count, size = self.symmetry.count_copies(name), self.symmetry[name].size
            last = torch.zeros(count, size, dtype=torch.bool)
            last[:, -max(size // 3, 1) :] = True  # A single unit may be inactive on the inputs.
            trial.remove(name, last.flatten())
            gone[name] = last
        try:
            self._smaller(trial, gone, is_compared=True)
        except ValueError as error:
            if len(sets) == 1:
                reasons[sets[0]] = str(error)
                return []
            half = len(sets) // 2
            return [*self._pass(sets[:half], reasons), *self._pass(sets[half:], reasons)]
        return sets

    def _smaller(
        self, network: Network, gone: Mapping[str, Tensor], *, is_compared: bool
    ) -> tuple[Params, Symmetry, dict[str, Tensor], nn.Module]:
        """Return the network without the removed units, and its module; compare it with the network before the cut."""
        assert network.task is not None
        kept = self._kept(gone)
        after = cut_symmetry(self.symmetry, {name: units.shape[-1] for name, units in kept.items()})
        small = cut_params(network.params, self.symmetry, kept)
        reference = network.run(network.params)

        def accept(module: nn.Module) -> bool:
            change = network.change(reference, network.run_smaller(module))
            return change <= network.tolerance if is_compared else change < float("inf")

        if self.build is not None:
            return small, after, kept, self.build(small, after, accept)
        try:
            return small, after, kept, resize(network.task.module, small, self.symmetry, after, accept)
        except ValueError as error:
            raise ValueError(f"{NORMED} ({error})" if is_compared else str(error)) from error

    def _kept(self, gone: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, mask in gone.items():
            left = mask.shape[1] - int(mask[0].sum())
            if left < mask.shape[1]:
                bases = [self.symmetry[base].size for base in self.symmetry[name].within]
                order = mask.to(torch.int64).argsort(dim=1, stable=True)[:, :left]
                kept[name] = order.reshape(*bases, left)
        return kept

    def remove_exactly(self, reference: list[Tensor]) -> tuple[Removal, ...]:
        """Remove the units that the network does not need, in several rounds, if the outputs do not change."""
        done: list[Removal] = []
        refused: set[tuple[str, int]] = set()
        groups = [self.symmetry[name] for names in self.free for name in names]
        groups = [group for group in groups if group.matrix == "none"]
        for _ in range(ROUNDS):
            flat = {name: mask.flatten() for name, mask in self.gone.items()}
            found = [one for one in find_removals(self.network, groups, flat) if (one.group, one.unit) not in refused]
            found = self._even(found)
            accepted = self._checked(found, reference, refused)
            if not accepted:
                break
            for one in accepted:
                self.gone[one.group].view(-1)[one.unit] = True
            done += accepted
        return tuple(done)

    def _even(self, found: Sequence[Removal]) -> list[Removal]:
        """Leave out removals until all copies in a set of groups lose equally many units, and each copy keeps at least
        one unit.
        """
        chosen: list[Removal] = []
        for names in self.free:
            lists: list[list[Removal]] = []
            for name in names:
                copies, size = self.gone[name].shape
                own = [[r for r in found if r.group == name and r.unit // size == copy] for copy in range(copies)]
                lists += own
            left = self.gone[names[0]].shape[1] - int(self.gone[names[0]][0].sum())
            number = min(min(map(len, lists)), left - 1)
            chosen += [one for own in lists for one in own[:number]]
        return chosen

    def _checked(
        self, found: Sequence[Removal], reference: list[Tensor], refused: set[tuple[str, int]]
    ) -> list[Removal]:
        """Apply and return the removals that do not change the outputs, tested together or in parts."""
        if not found:
            return []
        trial = self.network.fork()
        reason = apply_removals(trial, found)
        if not reason and self._is_same(trial, reference):
            self.network.params = trial.params
            return list(found)
        accepted: list[Removal] = []
        kinds = dict.fromkeys((next(k for k, names in enumerate(self.free) if r.group in names), r.why) for r in found)
        for number, why in kinds:
            own = [r for r in found if r.group in self.free[number] and r.why == why]
            trial = self.network.fork()
            reason = apply_removals(trial, own)
            if not reason and self._is_same(trial, reference):
                self.network.params = trial.params
                accepted += own
                continue
            refused |= {(r.group, r.unit) for r in own}
            self.fixed += [
                (f"{r.group}[{r.unit}]", reason or f"{r.why}, but outputs would change without it") for r in own
            ]
        return accepted

    def _is_same(self, trial: Network, reference: list[Tensor]) -> bool:
        return self.network.change(reference, trial.run(trial.params)) <= self.network.tolerance

    def remove_by(self, criterion: Criterion, shares: Mapping[str, float], generator: torch.Generator | None) -> None:
        """Remove units by the criterion until the requested share of each group is removed."""
        counts: dict[str, int] = {}
        for names in self.free + self.normed:
            for name in names:
                size = self.symmetry[name].size
                share = max(shares.get(other, 0.0) for other in names)
                count = max(round(share * size), int(self.gone[name][0].sum()))
                counts[name] = min(count, size - 1)
        chosen = tuple(name for name, count in counts.items() if count > int(self.gone[name][0].sum()))
        if not chosen:
            return
        params, symmetry = self.network.params, self.symmetry
        element = balance(params, symmetry, buffers="keep") if has_balance(symmetry) else None
        self.network.take(params if element is None else symmetry.act(element, params))
        mixed = [name for name in chosen if symmetry[name].matrix != "none"]
        if mixed:
            needed = {*mixed, *(base for name in mixed for base in symmetry[name].within)}
            own = tuple(group for group in symmetry.groups if group.name in needed)
            alone = replace(symmetry, groups=own, translations=())
            self.network.take(canonicalize(self.network.params, alone, parts=("linear",)))
        scores = criterion.scores(self.network, chosen, generator)
        before = dict(self.network.params)
        for name in chosen:
            self.gone[name] = criterion.remove(self.network, name, scores[name], self.gone[name], counts[name])
        if element is not None:
            inverse, blank = symmetry.inverse(element), symmetry.identity()
            for name in mixed:  # Cut tensors keep their directions.
                inverse = inverse.replace(name, blank[name])
            after = symmetry.act(inverse, self.network.params)
            changed = {name for name, tensor in self.network.params.items() if tensor is not before[name]}
            changed |= {place.parameter for name in mixed for place in symmetry[name].placements}
            self.network.take({name: after[name] if name in changed else params[name] for name in params})

    def finish(
        self,
        exact: tuple[Removal, ...],
        change: float,
        given: list[Tensor],
    ) -> Pruned:
        """Cut the tensors, build the smaller module, and compare it with the large network in which no layer reads
        removed units.
        """
        task = self.network.task
        sizes = {name: (mask.shape[1], mask.shape[1] - int(mask[0].sum())) for name, mask in self.gone.items()}
        is_compared = not any(sizes[name][0] > sizes[name][1] for names in self.normed for name in names)
        if task is None:
            kept = self._kept(self.gone)
            after = cut_symmetry(self.symmetry, {name: units.shape[-1] for name, units in kept.items()})
            small = self._in_coordinates(cut_params(self.network.params, self.symmetry, kept), after, kept)
            notes = ("the model was not run: without a task, no removal is checked, and none is exact",)
            params = self._as_given(small)
            return Pruned(params, after.given(params), kept, sizes, (), tuple(self.fixed), notes=notes)
        small, after, kept, module = self._smaller(self.network, self.gone, is_compared=is_compared)
        cut, outputs = None, self.network.run_smaller(module)
        if is_compared:
            cut = self.network.change(self.network.run(self.network.params), outputs)
        half = len(given) // 2  # The second half belongs to inputs that are not data.
        distance = self.network.change(given[:half], outputs[:half])
        params = self._as_given(self._in_coordinates(small, after, kept))
        if self.coordinates:
            for name, tensor in module.state_dict().items():  # Some modules load only state dicts with a version.
                if name in params:
                    tensor.copy_(params[name])
        module = module.to(next((t.dtype for t in self.given.values() if t.is_floating_point()), torch.float32))
        certificate = PruneCertificate(change, cut, self.network.tolerance, distance)
        return Pruned(
            params,
            after.given(params),
            kept,
            sizes,
            exact,
            tuple(self.fixed),
            module.train(task.module.training),
            certificate,
        )

    def _in_coordinates(self, small: Params, after: Symmetry, kept: Mapping[str, Tensor]) -> Params:
        """Return a smaller representative, transformed to the coordinates of the given network."""
        if not self.coordinates:
            return small
        whole = {n: t.detach().cpu().double() if t.is_floating_point() else t.cpu() for n, t in self.given.items()}
        given = cut_params(whole, self.symmetry, kept)
        return join_again(small, cut_coordinates(self.coordinates, self.symmetry.on_data, kept), given, after)

    def _as_given(self, params: Params) -> Params:
        """Return the tensors with the given network's names, dtypes and devices."""
        same: dict[int, Tensor] = {}
        result: Params = {}
        for name, old in self.given.items():
            tensor = params[name]
            result[name] = same.setdefault(id(tensor), round_to(tensor, old.dtype, name).to(old.device))
        return result
