"""The functions `align`, `align_pairs` and `align_many`, which align networks by elements of a symmetry."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from regauge.alignment.joint import Dictionaries, JointView, require_dictionaries, role_symmetry
from regauge.alignment.method import Method
from regauge.alignment.methods.merge_many import MergeMany
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem, bind_networks, bind_pairs
from regauge.alignment.representatives import Rotate, match_many, match_pairs, notes_on_ties
from regauge.alignment.result import Result, Results
from regauge.alignment.table import METHODS
from regauge.checkpoints.alignments import Alignment
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob, Network, open_call, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.core.arguments import check_arguments
from regauge.core.element import Element, stack
from regauge.core.given import as_networks, as_params, require_instance
from regauge.core.params import Params, batch_of_one, label
from regauge.core.progress import Progress, no_progress
from regauge.core.structure import carry, carry_pairs
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Joined = TypeVar("Joined", bound=Dictionaries)
POPULATIONS = "these are populations; align them with `regauge.alignment.align_pairs`, all pairs at once"
SINGLE = "give a list of single networks, not populations"


class Setting(TypedDict, total=False):
    """The keyword arguments of `align` that apply both to networks in memory and to networks in files."""

    method: Method | None
    task: Task | None
    generator: torch.Generator | None
    rotate: Rotate


class FileSetting(Setting, total=False):
    """The keyword arguments of `align`, including those that apply only to networks in files."""

    untie: bool
    out: Output | str | Path | None
    memory: int | str | MemoryLimit | None
    progress: Progress


class ManySetting(Setting, total=False):
    """The keyword arguments of `align_many`, including those that apply only to networks in files."""

    out: Sequence[Output | str | Path | None] | None
    memory: int | str | MemoryLimit | None


@overload
def align(
    params_a: Network, params_b: Network, symmetry: Symmetry, **setting: Unpack[FileSetting]
) -> Result[Params]: ...


@overload
def align(params_a: Joined, params_b: Joined, symmetry: Symmetry, **setting: Unpack[Setting]) -> Result[Joined]: ...


@check_arguments
@with_files
def align(
    params_a: Network | Dictionaries,
    params_b: Network | Dictionaries,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    rotate: Rotate = "auto",
    untie: bool = False,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> Result[Any]:
    """Find an element that brings the second network close to the first, and apply it to the second network.

    The result is never worse than the identity by the method's objective, and `params` computes the same function as
    `params_b`. If the symmetry has translations or gains, the method compares representatives (`Symmetry.split`). The
    aligned network gets the coordinates of the first network.

    Networks may also be checkpoints on disk. Checkpoints that need more than `memory` are streamed from disk. For
    streamed checkpoints, weights are matched, and `params` reads tensors from `out` on access.

    Args:
        params_a: The first network, which stays unchanged: parameters by name, or the path of a checkpoint. Some
            methods, such as `JointMatching`, align tuples of dictionaries; for these methods, pass a tuple.
        params_b: The second network, to which the element is applied. The given tensors of the second network are not
            modified. The element also acts on running statistics. The aligned network has the same structure tensors as
            the first network, bit by bit.
        symmetry: The symmetry of both networks.
        method: The alignment method. Default: `DataMatching()` if a task is given, and otherwise `WeightMatching()`.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers. The same generator state gives the
            same result.
        rotate: Whether residual streams are rotated or only permuted. Only groups with `behind_gains` can rotate.
            "auto" rotates if permutations match the stream poorly, as for networks from different seeds. Fine-tunes of
            one network are only permuted. Besides "auto", the options are "always" and "never".
        untie: Whether the tied output heads of Hugging Face folders get their own tensor. With `untie`, the written
            folder also contains the tensor of the head, and its config.json states that the head is not tied. An untied
            head no longer prevents rotations of the stream. With `untie`, `symmetry` must be the symmetry of the untied
            model. To get this symmetry, open the untied model with `with rg.hub.untie(folder,
            rg.Checkpoint.open(folder)) as (untied, _)`, and use `rg.open_model(untied).symmetry` within this context.
            For networks in memory, `untie` is not needed, because they store tied tensors separately under each name.
        out: The path or `Output` to which the aligned network is written. The written network has the names, dtypes and
            header of the second network. The alignment itself is written next to the aligned network. The arguments
            `out`, `memory` and `progress` apply only to networks on disk.
        memory: The memory limit: a number of bytes, or text such as "2GB". Default: half of the machine's memory.
        progress: A function that shows the progress of each pass over streamed files.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        KeyError: A parameter on which the symmetry acts is missing.
        TypeError: A network is not a dictionary of tensors, or the method is not an object of a method class. The
            method needs tuples of dictionaries but got single dictionaries, or the reverse.
        ValueError: The networks have different parameters, do not fit the symmetry, contain NaN or Inf, or are
            populations. No element maps the structure tensors of the second network to the structure tensors of the
            first network. The method needs a task or a generator that was not given. The memory limit is too low.
    """
    job = None
    if not isinstance(params_a, tuple) and not isinstance(params_b, tuple):
        ways: Any = {"work": "aligning", "symmetry": None if untie else symmetry, "generator": generator}
        named, settings = {"a": params_a, "b": params_b}, {"method": repr(method), **({"untie": True} if untie else {})}
        job = open_call("rg.align", settings, named, number=1, out=out, memory=memory, **ways)
    if untie:
        from regauge.hub.untied import untie_job  # importing the code that builds models is slow

        job = untie_job(job).named_by(symmetry)
    if job is not None:
        job = with_learning(job, method, task)
        if job.is_streamed:
            from regauge.alignment.streamed.job import align_job, plan_job

            streamed = align_job(plan_job(job, symmetry, method, task, rotate), progress)
            told = notes_on_ties(symmetry, job.checkpoints[0], streamed.params, rotate)
            return replace(streamed, notes=(*streamed.notes, *told))
        params_a, params_b = (checkpoint.params for checkpoint in job.checkpoints)
    if method is None:
        # Methods that look at activations import discovery, which takes longer than aligning small networks.
        method = WeightMatching() if task is None else METHODS["data"].load()()
    view, (a, b), (_, carried) = _view(method, (params_a, params_b), symmetry, POPULATIONS)
    pair = Problem(batch_of_one(a), batch_of_one(b), view.symmetry, task, generator)
    found = match_pairs(method, pair, rotate).item(0)
    element = view.element(found.element)
    result = replace(
        found,
        symmetry=view.whole,
        element=element if carried is None else view.whole.compose(element, carried),
        params=view.split(found.params, params_b),
    )
    told = notes_on_ties(symmetry, params_a, result.params, rotate)
    result = replace(result, notes=(*result.notes, *told, *(() if job is None else job.source.notes)))
    if job is not None and job.out is not None:
        job.write(result.params, partial(result.save, overwrite=True), progress)
    return result


@check_arguments
def align_pairs(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    rotate: Rotate = "auto",
) -> Results:
    """Align each network of a population to its partner in another population.

    Pair k consists of network k of the first population and network k of the second. If a single first network is
    given, every second network is aligned to it. Each pair gets the same result as from `align`. Some methods, such as
    `WeightMatching`, work on tensors with a leading pair axis. If a method matches all pairs at once, it is many times
    faster for small networks than a loop over the pairs. All other methods process one pair after the other.

    Args:
        params_a: The first networks, which stay unchanged. Every tensor has a leading model axis, unless a single
            network is given.
        params_b: The second networks, to which the elements are applied, with a leading model axis on every tensor. The
            given tensors of the second networks are not modified. The elements also act on buffers.
        symmetry: The symmetry of all networks.
        method: The alignment method. Default: `WeightMatching()`.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers.
        rotate: Whether residual streams are rotated or only permuted. Only groups with `behind_gains` can rotate.
            "auto" rotates if permutations match the stream poorly, as for networks from different seeds. Fine-tunes of
            one network are only permuted. Besides "auto", the options are "always" and "never".

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        TypeError: The method needs tuples of dictionaries.
        ValueError: The networks have different parameters, do not fit the symmetry, differ in number, or contain NaN or
            Inf. No element maps the structure tensors of a network to those of its partner. The method needs a task or
            a generator that was not given.
    """
    method = WeightMatching() if method is None else method
    require_method(method)
    if method.joint_roles:
        raise TypeError(f"{type(method).__name__} aligns tuples of dictionaries; align them one by one with `align`")
    params_a, params_b = as_params(params_a, "the first networks"), as_params(params_b, "the second networks")
    params_a, symmetry = bind_pairs(params_a, params_b, symmetry)
    carried = carry_pairs(symmetry, params_a, params_b)
    if carried is None:
        return match_pairs(method, Problem(params_a, params_b, symmetry, task, generator), rotate)
    symmetry = symmetry.given(params_a)
    pairs = Problem(params_a, symmetry.act(carried, params_b), symmetry, task, generator)
    found = match_pairs(method, pairs, rotate)
    return replace(found, element=symmetry.compose(found.element, carried))


@overload
def align_many(
    params: Sequence[Network], symmetry: Symmetry, **setting: Unpack[ManySetting]
) -> Result[tuple[Params, ...]]: ...


@overload
def align_many(
    params: Sequence[Joined], symmetry: Symmetry, **setting: Unpack[Setting]
) -> Result[tuple[Joined, ...]]: ...


@check_arguments
@with_files
def align_many(
    params: Sequence[Network] | Sequence[Dictionaries],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    rotate: Rotate = "auto",
    out: Sequence[Output | str | Path | None] | None = None,
    memory: int | str | MemoryLimit | None = None,
) -> Result[Any]:
    """Find one element for each of several networks, such that all transformed networks are close to one another.

    The elements map the networks into common coordinates, called a universe. If every network is aligned to the first
    network instead, the result depends on which network is first. If every pair is aligned separately, the alignments
    contradict each other: the product of the elements A to B and B to C differs from the element A to C. In a universe,
    the quotient of the elements of two networks aligns these two networks.

    `MergeMany` is the default. On five MNIST networks, the objective of `MergeMany` is within 1.2% of that of
    `FrankWolfe` for plain MLPs, and 2% above it for residual MLPs. `MergeMany` takes a sixth of the time of
    `FrankWolfe`. The average of the five MNIST networks has similar losses after `MergeMany` and `FrankWolfe` (plain:
    0.27 and 0.26, residual: 0.27 and 0.28). If all five MNIST networks are aligned to the first of them, the losses of
    their average are 0.35 (plain) and 0.43 (residual).

    If one common element is applied to all networks, the result is another universe. `align_many` returns the universe
    in which the first network is unchanged.

    Args:
        params: One or more networks: parameters by name, or paths of checkpoints. The given tensors of the networks are
            not modified. The elements also act on buffers. For methods that align tuples of dictionaries, such as
            `JointMatching`, each network is a tuple.
        symmetry: The symmetry of all networks.
        method: The alignment method. Default: `DataMatching()` if a task is given, and otherwise `MergeMany()`. A
            method for pairs aligns every network to the first one.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers. The same generator state gives the
            same result.
        rotate: Whether residual streams are rotated or only permuted. Only groups with `behind_gains` can rotate.
            "auto" rotates if permutations match the stream poorly, as for networks from different seeds. Fine-tunes of
            one network are only permuted. Besides "auto", the options are "always" and "never".
        out: For each checkpoint, the path or `Output` to which the aligned checkpoint and its alignment are written. An
            entry is None for a network that is not written.
        memory: The memory limit for checkpoints: a number of bytes, or text such as "2GB". Default: half of the
            machine's memory. All parameters of all networks must fit within the memory limit.

    Raises:
        FileExistsError: An output exists and may not be replaced.
        KeyError: A parameter on which the symmetry acts is missing.
        TypeError: The networks are not given as a list. The method needs tuples of dictionaries but got single
            dictionaries, or the reverse.
        ValueError: There is no network, or the networks have different parameters, do not fit the symmetry, contain NaN
            or Inf, or are populations. No element maps the structure tensors of a network to those of the first
            network. The method needs a task or a generator that was not given.

    References:
        Crisostomi et al. (2024), C2M3, for the universe; Ainsworth et al. (2023), Git Re-Basin, for MergeMany.
    """
    params = as_networks(params)
    if not params:
        raise ValueError("there is no network to align; give at least one")
    if method is None:
        method = MergeMany() if task is None else METHODS["data"].load()()
    jobs: list[FileJob] = []
    if out is not None or memory is not None or any(isinstance(one, str | Path | Checkpoint) for one in params):
        jobs = _open_many(params, method, symmetry, task, generator, out, memory)
        params = [job.source.params for job in jobs] or params
    view, networks, carried = _view(method, params, symmetry, SINGLE)
    problem = ManyProblem(networks, view.symmetry, task, generator)
    if len(networks) > 1:
        found = match_many(method, problem, rotate)
    else:
        alone = [view.symmetry.identity()]
        found = problem.result(alone, objective=0.0, initial=0.0, history=[0.0], is_converged=True)
    first: Any = params[0] if view.roles else found.params[0]
    moved = [view.split(one, like) for one, like in zip(found.params[1:], params[1:], strict=True)]
    element = view.element(found.element)
    if any(one is not None for one in carried):
        before = [view.whole.identity() if one is None else one for one in carried]
        element = view.whole.compose(element, stack(before))
    for k, (job, network) in enumerate(zip(jobs, (first, *moved), strict=False)):
        if job.out is not None:
            job.write(network, partial(Alignment(view.whole, element.item(k)).save, overwrite=True))
    told = [note for one in moved for note in notes_on_ties(symmetry, first, one, rotate)]
    notes = tuple(dict.fromkeys((*found.notes, *told)))
    return replace(found, symmetry=view.whole, element=element, params=(first, *moved), notes=notes)


def _open_many(
    params: Sequence[Any],
    method: Method,
    symmetry: Symmetry,
    task: Task | None,
    generator: torch.Generator | None,
    out: Sequence[Output | str | Path | None] | None,
    memory: int | str | MemoryLimit | None,
) -> list[FileJob]:
    """Return one `FileJob` for each checkpoint.

    A `FileJob` opens the checkpoint and may write the aligned checkpoint.
    """
    jobs: list[FileJob] = []
    outputs = [None] * len(params) if out is None else list(out)
    if len(outputs) != len(params):
        raise ValueError(f"there are {len(params)} networks, but {len(outputs)} outputs; give one for each, or None")
    ways: Any = {"work": "aligning many networks", "symmetry": symmetry, "generator": generator}
    for k, one in enumerate(outputs):
        settings, named = {"method": repr(method), "number": k}, {"networks": params}
        job = open_call("rg.align_many", settings, named, networks=params, number=k, out=one, memory=memory, **ways)
        if job is not None:
            job.require_memory()
            jobs.append(job)
    if jobs:
        with_learning(jobs[0], method, task)  # once is enough: all jobs hold the same networks
    return jobs


def with_learning(job: FileJob, method: object, task: Task | None) -> FileJob:
    """Return a job that also counts the memory for running the model; see `Method.planned`.

    If a task is given, the default method runs the model.
    """
    if method is None and task is not None:
        method = METHODS["data"].load()()
    return method.planned(job, task) if isinstance(method, Method) else job


def require_method(method: object) -> None:
    """Raise a TypeError unless the argument is an object of a method class."""
    require_instance(method, Method, "method", {name: f"method=regauge.{row.name}()" for name, row in METHODS.items()})


def _view(
    method: Method, networks: Sequence[object], symmetry: Symmetry, hint: str
) -> tuple[JointView, list[Mapping[str, Tensor]], list[Element | None]]:
    """Check the networks, map their structure tensors to those of the first network, and join the dictionaries of each
    network.
    """
    require_method(method)
    roles = method.joint_roles
    several = [require_dictionaries(method, roles, network, label(k)) for k, network in enumerate(networks)]
    symmetry = bind_networks([dictionaries[0] for dictionaries in several], symmetry, hint)
    carried: list[Element | None] = [None] * len(several)
    if symmetry.structure:
        carried = [carry(symmetry, several[0][0], dictionaries[0]) for dictionaries in several]
    several = [
        network
        if element is None
        else tuple(
            role_symmetry(symmetry, role, one).act(element, one)
            for role, one in zip(roles or ("parameters",), network, strict=True)
        )
        for network, element in zip(several, carried, strict=True)
    ]
    view = JointView.of(roles, symmetry, several)
    return view, [view.join(dictionaries) for dictionaries in several], carried
