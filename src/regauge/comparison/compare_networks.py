"""The function `compare`, which decides whether two networks are the same, related by descent, or unrelated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import Network, open_job, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.comparison.common import find_common
from regauge.comparison.compare_sampled import compare_sampled
from regauge.comparison.comparison import Comparison
from regauge.comparison.comparison_report import require_page, write_page
from regauge.comparison.conversion.find_tensor_map import find_reordered
from regauge.comparison.depths import Depths, match_depths
from regauge.comparison.independence import DRAWS
from regauge.comparison.match_streamed import match_streamed, without_widths
from regauge.comparison.match_whole import match_whole
from regauge.comparison.match_widths import match_widths
from regauge.comparison.matched import Matched, weigh
from regauge.comparison.origins import Origins
from regauge.comparison.pair import Pair
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import require_finite
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

SAME = ("identical", "same network in another gauge")
NO_ORDER = "no p-value: it compares the order of units, but no group has the same number of units in both networks"


@check_arguments
@with_files
def compare(
    params_a: Network,
    params_b: Network,
    symmetry: Symmetry,
    *,
    task: Task | None = None,
    references: Sequence[Mapping[str, Tensor]] = (),
    draws: int = DRAWS,
    generator: torch.Generator | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    exact: bool = False,
    progress: Progress = no_progress,
) -> Comparison:
    """Compare two networks, both as stored and up to their symmetry.

    First, the weights of the second network are aligned to the weights of the first. The verdict depends on three
    measurements: the remaining distance, the explained share beyond chance, and whether units correspond in their
    stored order. The explained share of a tensor is the squared correlation between its aligned versions in both
    networks.

    In the table, A is the first network and B the second network.

    | verdict | when |
    | --- | --- |
    | identical | all values are equal, apart from rounding to the coarser of both formats |
    | same network in another gauge | an element of the symmetry maps one network to the other, up to rounding |
    | descended | after alignment, B explains more of A than any independent network does, even an aligned one |
    | aligned to A, or a distant descendant | B explains less of A, but the stored orders of units agree beyond chance |
    | unrelated | neither the weights nor the stored orders agree beyond chance |
    | undecided | the evidence lies between these cases |

    Alignment always finds some similarity, even between unrelated networks. The share that is explained by chance is
    measured on scrambled copies of the second network ("strangers"). In a scrambled copy, a separate random element
    acts on each tensor. "Descended" is symmetric: one network descends from the other, or both descend from a third
    network. `regauge.comparison.verdicts` defines the thresholds. The thresholds were chosen on networks that are not
    part of the reported measurements.

    The p-value and z-score test the stored order of units. The p-value and z-score are exact unless somebody chose the
    order of units, for example by aligning one network to another. Therefore a small p-value alone never leads to the
    verdict "descended". If regauge aligned a network, and the file records this together with the element, the
    alignment is undone first. If the file records an alignment without its element, a note mentions the alignment.

    If networks differ in widths, vocabularies or numbers of layers, only the tensors that both have are compared.
    Tensors of the same shape are compared completely. If two tensors differ in length along an axis on which no group
    acts, such as the token axis, they are compared up to the shorter length. One network may have more units in a
    permutation group than the other, for example before `regauge.prune`. From the larger group, only the units that
    best match the other network are compared (`Comparison.units`). One network may also have more blocks, such as
    `layers.7`, than the other. If the numbers of blocks differ, the most similar blocks of both networks are compared,
    in their order. The notes list all tensors and units that are not compared. The verdict on networks of different
    shapes is never "identical". If the common parts of networks of different shapes are identical, the verdict is
    "descended".

    Args:
        params_a: The first network, which stays unchanged: parameters by name, or the path of a checkpoint.
        params_b: The second network, which is aligned to the first.
        symmetry: The symmetry of both networks. If the shapes differ, pass the symmetry of the first network.
        task: Model, data and loss, for comparing outputs, barriers and the loss of the merged network.
        references: Networks that are known to be independent of the first network. References must be trained in the
            same way as an independent second network would have been trained. `reference_p_value` is the rank of the
            second network among the references, by the distance of its fingerprint from the first network's
            fingerprint. The reference p-value is exact even if elements were applied to the networks.
        draws: The number of random elements in the independence test.
        generator: The source of randomness for the independence test. Default: a generator with seed 0, which always
            gives the same result.
        out: The path or `Output` of the HTML page of the comparison, a self-contained `.html` file.
        memory: The memory limit for networks in files: a number of bytes, or text such as "2GB". Default: half of the
            machine's memory. Networks that need more memory are streamed. Fingerprints of streamed networks are not
            computed.
        exact: Whether to compare all entries. By default, a sample of large networks is compared first. If the sample
            gives a clear answer, only the sample is read, and a note states this. If only the sample is read, all other
            entries are not checked for NaN or Inf.
        progress: A function that shows the progress of each pass over streamed files.

    Raises:
        FileExistsError: The page exists and may not be replaced.
        KeyError: A parameter on which the symmetry acts is missing.
        TypeError: Only one of the networks is in a file.
        ValueError: The symmetry acts on no tensor that both networks have, or one network lacks a tensor outside
            numbered layers. The networks do not fit the symmetry, contain NaN or Inf, or are populations. The memory
            limit is too low. A task or references are given for streamed networks, or a task is given for networks with
            different shapes.
    """
    generator = given_or_seed(generator)
    if draws < 1:
        raise ValueError(f"draws is {draws}; a test needs at least one random element, and 999 are usual")
    page = require_page(out)
    job = open_job((params_a, params_b), 1, memory=memory, work="comparing")
    name_a, name_b = ["a network in memory"] * 2 if job is None else [one.label for one in job.checkpoints]
    if job is not None:
        job = job.named_by(symmetry)
        params_a, params_b = job.checkpoints
    assert isinstance(params_a, Mapping)
    assert isinstance(params_b, Mapping)
    origins, depths = Origins.read(params_a, params_b), Depths()
    if job is None or not job.is_streamed:
        params_b, depths = match_depths(params_a, params_b, symmetry)
    common = find_common(params_a, params_b, symmetry)
    if common is not None and common.widths is not None and job is not None and job.is_streamed:
        common = without_widths(job, symmetry)
    if common is not None and not common.is_whole:
        if task is not None:
            raise ValueError(
                f"a task runs both networks with one model, but they differ: {common.notes[0]}; leave the task out"
            )
        origins = origins.cut
    has_widths = common is not None and common.widths is not None
    if common is not None and not has_widths:
        symmetry, params_a, params_b = common.symmetry, common.of(params_a), common.of(params_b)
        references = [_in_memory(common.of(one)) for one in references]
        if job is not None and isinstance(params_a, Checkpoint) and isinstance(params_b, Checkpoint):
            job = replace(job, checkpoints=(params_a, params_b))
    found, matched = None, None
    if not (references or has_widths) and task is None and (common is None or common.is_whole):
        matched = match_equal(params_a, params_b, symmetry)
        if matched is None and not exact:
            limit = None if job is None else job.limit
            found = compare_sampled(
                params_a, params_b, symmetry, origins, draws=draws, generator=generator, memory=limit
            )
    if found is None and matched is None:
        if common is not None and has_widths:
            a, b = _in_memory(params_a), _in_memory(params_b)
            matched = match_widths(a, b, symmetry, common, references=references)
        elif job is not None and job.is_streamed:
            matched = match_streamed(job, symmetry, task=task, references=references, progress=progress)
        else:
            a, b = _in_memory(params_a), _in_memory(params_b)
            matched = match_whole(a, b, symmetry, task=task, references=references)
    if found is None:
        assert matched is not None
        found = weigh(matched, common, origins, draws=draws, generator=generator)
    more = [NO_ORDER] if has_widths and found.p_value is None else []
    if found.verdict not in SAME and (common is None or common.is_whole) and not (job is not None and job.is_streamed):
        more += [reordered] if (reordered := find_reordered(params_a, params_b)) else []
    found = replace(found, notes=(*depths.notes, *map(depths.as_stored, found.notes), *more))
    if page is not None:
        write_page(page, found.facts | {"a": name_a, "b": name_b}, generator.initial_seed())
    return found


def match_equal(
    a: Mapping[str, Tensor] | Checkpoint, b: Mapping[str, Tensor] | Checkpoint, symmetry: Symmetry
) -> Matched | None:
    """Match two networks by the identity if all compared entries are equal, and return None at the first difference.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The networks do not fit the symmetry, or contain NaN or Inf.
    """
    symmetry = symmetry.bind(a.on_meta() if isinstance(a, Checkpoint) else a)
    pair = Pair(a, b, symmetry)
    is_single = all(len(pair.shapes.get(name, shape)) == len(shape) for name, shape in symmetry.shapes.items())
    if Pair(b, a, symmetry).shapes != pair.shapes or not is_single:
        return None
    for name in pair.shapes:
        for x, y in pair.pieces(name):
            if not torch.equal(x, y):
                return None
            require_finite({name: x}, "the first network", symmetry.structure)
    return Matched(pair, symmetry.identity(), lambda: None, tested=pair, distances=(0.0,))


def _in_memory(network: Mapping[str, Tensor] | Checkpoint) -> Mapping[str, Tensor]:
    return network.params if isinstance(network, Checkpoint) else network
