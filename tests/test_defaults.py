"""Defaults as laws: with default options, a command never makes its own objective worse."""

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from coverings import covering
from two_faces import MODULES, Case

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params

pytestmark = pytest.mark.usefixtures("unsaved")
EXACT = {torch.float32: 1e-5, torch.float16: 2e-2}
"""The largest change of outputs that rounding of the written network may cause, as a share of the largest output
entry."""
ACCUSED = ("identical", "same network in another gauge", "descended")
"""Verdicts that state a common origin of networks."""
STORED = ("canonicalize", "canonicalize to a reference")
"""Commands that write running statistics in canonical scales, and report this. The written network computes the same
function as stored."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: Case.make(name, tmp_path_factory.mktemp(name)) for name in MODULES}


WRITTEN: dict[str, tuple[str, ...]] = {
    "align": ("align", "a.safetensors", "b.safetensors"),
    "align by data": ("align", "a.safetensors", "b.safetensors", "--data", "nets.py:batches"),
    "apply": ("apply", "element.alignment.safetensors", "b.safetensors"),
    "apply --inverse": ("apply", "element.alignment.safetensors", "element.safetensors", "--inverse"),
    "canonicalize": ("canonicalize", "b.safetensors"),
    "canonicalize to a reference": ("canonicalize", "b.safetensors", "--reference", "a.safetensors"),
    "gauge": ("gauge", "b.safetensors"),
    "gauge by data": ("gauge", "b.safetensors", "--data", "nets.py:batches"),
    "gauge always": ("gauge", "b.safetensors", "--method", "equalize", "--always"),
    "prune": ("prune", "b.safetensors"),
}
"""Commands whose output computes the same function as b."""


OWN = [("canonicalize", "normed"), ("prune", "masked"), ("gauge", "halved"), ("apply --inverse", "normed")]
"""Networks with stored running statistics, units tied by masks, 16-bit numbers, and statistics that are transformed
back."""


@pytest.mark.parametrize(("verb", "name"), covering(WRITTEN, MODULES, own=OWN))
def test_what_is_written_evaluates_as_what_was_given(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, verb: str, name: str
) -> None:
    case = cases[name]
    monkeypatch.chdir(case.folder)
    written, given = write(case, verb), case.params("b")
    assert {n: (t.shape, t.dtype) for n, t in written.items()} == {n: (t.shape, t.dtype) for n, t in given.items()}
    assert difference(case, written, given) < EXACT[case.dtype]
    if verb not in STORED:
        anew = [rg.connect.reset_batchnorm(one, case.module, list(case.task(1).batches)) for one in (written, given)]
        assert difference(case, *anew) < EXACT[case.dtype]


def write(case: Case, verb: str) -> Params:
    """Write the output of a command for b."""
    if verb.startswith("apply") and not Path("element.safetensors").exists():
        main(["align", "a.safetensors", "b.safetensors", "-o", "element.safetensors", *case.options(data=False)])
    out = f"{verb.replace(' ', '-')}.safetensors"
    words = WRITTEN[verb]
    main([*words, "-o", out, "--overwrite", *(() if words[0] == "apply" else case.options(data=False))])
    return load(Path(out))


def difference(case: Case, params: Params, given: Params) -> float:
    inputs = next(iter(case.task(0).batches))[0]
    outputs, expected = (torch.func.functional_call(case.module, one, (inputs,)).double() for one in (params, given))
    return float((outputs - expected).abs().max() / expected.abs().max())


Law = Callable[[Case], tuple[float, float]]
"""The value of an objective that the default reaches, and the value that it must not exceed."""


def distance_of_representatives(case: Case) -> tuple[float, float]:
    said = case.run("align", "a.safetensors", "b.safetensors", "-o", "near.safetensors", *case.options(data=False))
    gain = said["gains"][0]
    return gain["after"], gain["before"]


def distance_of_a_moved_copy(case: Case) -> tuple[float, float]:
    symmetry = case.symmetry.given(case.params("a"))
    element = symmetry.random(torch.Generator().manual_seed(5), parts=("permutation", "sign"))
    save(symmetry.act(element, case.params("a")), case.folder / "copy.safetensors")
    said = case.run("align", "a.safetensors", "copy.safetensors", "-o", "moved.safetensors", *case.options(data=False))
    return said["gains"][0]["after"], 1e-4 * said["gains"][0]["before"]


def barrier_of_a_merge(case: Case) -> tuple[float, float]:
    said = case.run("merge", "a.safetensors", "b.safetensors", "-o", "merge.safetensors", *case.options())["record"]
    return said["merged_metrics"]["loss"], said["unaligned_metrics"]["loss"]


def barrier_of_a_merge_with_data(case: Case) -> tuple[float, float]:
    """Return means over three pairs, because on unused examples a single pair may become better or worse."""
    judge, total = case.tasks()[1], {"with": 0.0, "without": 0.0}
    for pair in combinations("abc", 2):
        files = [f"{letter}.safetensors" for letter in pair]
        for name in total:
            out = ("-o", "pair.safetensors", "--overwrite")
            case.run("merge", *files, *out, *case.options(data=name == "with"))
            total[name] += judge.evaluate_average(load(case.folder / "pair.safetensors"))["loss"]
    return total["with"], total["without"]


def loss_after_rounding(case: Case) -> tuple[float, float]:
    said = case.run("gauge", "a.safetensors", "-o", "loss.safetensors", "--bits", "3", *case.options())["trials"]
    return said["judged"][said["kept"]], said["judged"]["as it is"]


def error_of_rounding(case: Case) -> tuple[float, float]:
    said = case.run("gauge", "a.safetensors", "-o", "error.safetensors", "--bits", "3", *case.options(data=False))
    return said["trials"]["values"][said["trials"]["kept"]], said["trials"]["values"]["as it is"]


def loss_of_a_repair(case: Case) -> tuple[float, float]:
    case.run("merge", "a.safetensors", "b.safetensors", "-o", "mean.safetensors", *case.options(data=False))
    ends = ("--endpoints", "a.safetensors", "b.safetensors", "--align")
    said = case.run("repair", "mean.safetensors", "-o", "repaired.safetensors", *ends, *case.judged())["networks"]
    return said[1]["loss"], said[0]["loss"]


def function_of_an_audited_pair(case: Case) -> tuple[float, float]:
    smooth, balance = {"normed": ("1", "3")}.get(case.name, ("0", "2"))
    table = case.folder / "pairs.json"
    table.write_text(json.dumps([{"smooth_layer": f"re:^{smooth}$", "balance_layers": [f"re:^{balance}$"]}]))
    said = case.run("audit", "a.safetensors", "--mappings", "pairs.json", *case.options(data=False))["findings"]
    assert [one["verdict"] for one in said] == ["holds"]
    return max(one["change"] for one in said), 1e-9


def verdicts_of_aligned_strangers(case: Case) -> tuple[float, float]:
    """Return the number of aligned strangers for which the verdict states a common origin."""
    accused = 0
    for letter in "bc":
        out = f"stranger-{letter}.safetensors"
        case.run("align", "a.safetensors", f"{letter}.safetensors", "-o", out, *case.options(data=False))
        for words in ((), case.options()):
            said = case.run("compare", "a.safetensors", out, *(words or case.options(data=False)))
            accused += said["verdict"] in ACCUSED
    return accused, 0


DEFAULTS: dict[str, Law] = {
    "align: distance of representatives": distance_of_representatives,
    "align: distance of a moved copy": distance_of_a_moved_copy,
    "merge: barrier": barrier_of_a_merge,
    "merge: barrier with data": barrier_of_a_merge_with_data,
    "gauge: loss after rounding": loss_after_rounding,
    "gauge: error of rounding": error_of_rounding,
    "repair: loss": loss_of_a_repair,
    "audit: function of a pair": function_of_an_audited_pair,
    "compare: aligned strangers": verdicts_of_aligned_strangers,
}
"""Objectives of commands. Another law covers canonical and transformed networks, whose outputs must not change."""
WITH_STATISTICS = [("merge: barrier", "normed"), ("repair: loss", "normed")]
"""Commands that recompute the statistics of batch normalization."""


@pytest.mark.parametrize(("law", "name"), covering(DEFAULTS, MODULES, part=1, own=WITH_STATISTICS))
def test_no_default_makes_its_own_objective_worse(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, law: str, name: str
) -> None:
    monkeypatch.chdir(cases[name].folder)
    reached, limit = DEFAULTS[law](cases[name])
    assert reached <= limit
