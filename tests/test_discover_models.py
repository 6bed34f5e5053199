"""Discovery on known architectures finds the groups that a person would name, each correct and with all placements."""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from coverings import every_other
from models import CASES, Case, symmetry_of

import regauge as rg
from regauge.core.probe import PROBE_TOLERANCE, TOLERANCE_SINGLE, Probe, perturb, relative_change
from regauge.nets.siren import Siren

MUTANTS = 40
"""The number of omitted placements that are tried for one model."""

BY_NAME = {case.name: case for case in CASES}
EVERY = [
    pytest.param(name, id=name, marks=[pytest.mark.slow] if case.is_slow else []) for name, case in BY_NAME.items()
]


@dataclass(frozen=True)
class Found:
    """A case, its module, and the result of discovery without its own check."""

    case: Case
    module: torch.nn.Module
    symmetry: rg.Symmetry


@pytest.fixture(scope="module", params=EVERY)
def found(request: pytest.FixtureRequest) -> Found:
    case = BY_NAME[request.param]
    torch.manual_seed(0)
    return Found(case, case.module().eval(), symmetry_of(case))


def test_finds_the_groups_that_a_person_would_name(found: Found) -> None:
    assert summary(found.symmetry) == expected(found.case), str(found.symmetry)


def test_every_group_leaves_the_outputs_unchanged(found: Found) -> None:
    case, generator = found.case, torch.Generator().manual_seed(1)
    check = found.symmetry.verify(found.module, case.inputs(), case.kwargs(), generator=generator, outputs=case.outputs)
    assert check.ok, str(check)
    assert check.max_error < _tolerance(case)


def test_leaving_out_any_placement_changes_the_outputs(found: Found) -> None:
    case, generator = found.case, torch.Generator().manual_seed(2)
    probe = Probe(found.module, case.inputs(), case.kwargs(), case.outputs)
    params = perturb(probe.params, set(probe.buffers), generator)
    reference = probe(params)
    mutants = [mutant for mutant in _mutants(found.symmetry) if not mutant[1].endswith(case.irrelevant or ("\0",))]
    survivors = []
    for group, parameter, axis in random.Random(0).sample(mutants, min(MUTANTS, len(mutants))):
        broken = _without(found.symmetry, group, parameter, axis)
        element = _moving(broken, group, generator)
        if not relative_change(reference, probe(broken.act(element, params))) > _tolerance(case):
            survivors.append(f"{group} on {parameter}[{axis}]")
    assert not survivors


@pytest.mark.parametrize("found", every_other(BY_NAME, part=1), indirect=True)
def test_the_fingerprint_is_the_same_for_all_copies_and_another_for_other_weights(found: Found) -> None:
    case, generator = found.case, torch.Generator().manual_seed(3)
    probe = Probe(found.module, case.inputs(), case.kwargs(), case.outputs)
    first, other = ({**perturb(probe.params, set(probe.buffers), generator)} for _ in range(2))
    for params in (first, other):
        params |= {name: params[names[0]] for names in found.symmetry.tied for name in names[1:]}
    moved = found.symmetry.act(found.symmetry.random(generator), first)
    numbers, same, another = (rg.comparison.fingerprint(params, found.symmetry) for params in (first, moved, other))
    assert (numbers - same).norm() < 1e-9
    assert (numbers - another).norm() > 1e-3


def test_survives_its_text_form_and_explains_what_it_froze(found: Found) -> None:
    assert rg.Symmetry.from_json(found.symmetry.to_json()) == found.symmetry
    assert all(row.reason for row in found.symmetry.frozen)
    assert not found.symmetry.unknown


def summary(symmetry: rg.Symmetry) -> tuple[Counter[str], dict[str, int]]:
    """Return groups in the notation of `models`, and the total numbers of families."""
    sizes = {group.name: group.size for group in symmetry.groups}
    named: Counter[str] = Counter()
    for group in symmetry.groups:
        letter = {"none": "S", "orthogonal": "SO" if group.is_proper else "O", "linear": "GL"}[group.matrix]
        letter = "O1 " if group.keeps_ones else letter
        copies = math.prod(sizes[base] for base in group.within)
        if group.is_permuted or group.matrix != "none":
            named[f"{letter}{group.size}" + (f"^{copies}" if group.within else "")] += 1
    families = {
        "scales": sum(group.scales for group in symmetry.groups),
        "signs": sum(group.signs for group in symmetry.groups),
        "shifts": sum(group.shifts for group in symmetry.groups),
    }
    return named, families


def expected(case: Case) -> tuple[Counter[str], dict[str, int]]:
    """Return the groups that a case states, in the form of `summary`."""
    named: Counter[str] = Counter()
    for word in case.expected.split():
        match = re.fullmatch(r"(?:(\d+)\*)?(\S+)", word)
        assert match is not None
        named[match[2]] += int(match[1] or 1)
    return named, {"scales": case.scales, "signs": case.signs, "shifts": case.shifts}


def _tolerance(case: Case) -> float:
    return TOLERANCE_SINGLE if case.name in SINGLE else PROBE_TOLERANCE


SINGLE = {"hf_llama", "hf_qwen3", "hf_mixtral", "hf_t5", "hf_mamba"}
"""Models whose normalization computes in float32, for any dtype of the parameters."""


def _mutants(symmetry: rg.Symmetry) -> Iterator[tuple[str, str, int]]:
    for group in symmetry.groups:
        if group.is_permuted or group.scales or group.signs or group.shifts or group.matrix != "none":
            for parameter, axis in dict.fromkeys((p.parameter, p.axis) for p in group.placements):
                if any(_moves(group, p) for p in group.placements if (p.parameter, p.axis) == (parameter, axis)):
                    yield group.name, parameter, axis


def _moves(group: rg.Group, placement: rg.Placement) -> bool:
    acts = any(placement.scale) or any(placement.sign) or any(placement.parity) or any(placement.shift)
    return (group.is_permuted and group.size > 1) or group.matrix != "none" or acts


def _without(symmetry: rg.Symmetry, name: str, parameter: str, axis: int) -> rg.Symmetry:
    """Return only the group and its bases, where the group has no placements on one axis."""
    group = symmetry[name]
    kept = tuple(p for p in group.placements if (p.parameter, p.axis) != (parameter, axis))
    bases = tuple(symmetry[base] for base in group.within)
    return replace(symmetry, groups=(*bases, replace(group, placements=kept)))


def _moving(symmetry: rg.Symmetry, name: str, generator: torch.Generator) -> rg.Element:
    """Return a random value of one group that moves every unit, and the identity for all other groups."""
    value = symmetry.random(generator)[name]
    if value.perm is not None:
        value = replace(value, perm=symmetry.identity()[name].perm.roll(1, -1))
    if value.sign is not None:
        value = replace(value, sign=-torch.ones_like(value.sign))
        value.sign[..., ::2] = 1
        value.sign[..., :1] = -1
    return symmetry.identity().replace(name, value)


@pytest.mark.parametrize("width", [6, 16, 64])
@pytest.mark.parametrize("depth", [4, 5, 6, 8])
def test_deep_sines_are_compared_where_they_do_not_multiply_rounding_errors(width: int, depth: int) -> None:
    """A layer of sines of frequency 30 with weights of usual size multiplies every error by 20."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        module, inputs = Siren(3, width, 1, depth=depth, generator=generator), torch.zeros(2, 3)
        symmetry = rg.discover(module, (inputs,))
        assert [group.size for group in symmetry.groups] == [width] * depth
        spoiled = replace(symmetry.groups[1], placements=symmetry.groups[1].placements[1:])
        groups = (symmetry.groups[0], spoiled, *symmetry.groups[2:])
        check = rg.Symmetry(groups, symmetry.shapes).verify(module, (inputs,), generator=generator)
        assert check.failed == (spoiled.name,)
