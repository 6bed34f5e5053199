"""Studies of learned alignment: networks that are reserved, initializations of other methods, and reduced
populations.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regauge as rg
from regauge.core.params import Params
from regauge.nets.mlp import mlp
from regauge_papers.experiment import Run
from regauge_papers.learned import images, reduced, starts
from regauge_papers.learned.study import Networks
from regauge_papers.table import Row
from regauge_papers.ways import Way


def test_pairs_are_two_views_of_signals_that_no_matcher_has_seen(tmp_path: Path) -> None:
    (population,) = images.config("smoke").lessons.populations
    assert population.config.copies == 3
    networks = Networks.of(population, Run("smoke", 0, tmp_path))
    signals = {part: networks.store.rows["signal"][own].tolist() for part, own in networks.split.items()}
    assert signals == {"test": [4, 4], "validation": [2, 2, 2, 3, 3, 3], "train": [0, 0, 0, 1, 1, 1]}
    assert len({*networks.split["test"].tolist()}) == 2


def test_lines_are_judged_on_as_many_examples_as_are_asked_for(tmp_path: Path) -> None:
    population = replace(reduced.config("smoke", name="learned-cnn").lessons.populations[0], judged=70)
    networks = Networks.of(population, Run("smoke", 0, tmp_path))
    batches = networks.task(50, is_kept=True).batches
    assert sum(len(targets) for _, targets in batches) == 70
    assert torch.equal(batches[0][0], networks.examples.validation_inputs[:70])
    assert sum(len(targets) for _, targets in networks.task(50).batches) == 50


MODULE = mlp(6, 8, 8, 3).double()


def network(seed: int) -> Params:
    """Return random parameters in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).double() for name, t in MODULE.state_dict().items()}


SYMMETRY = rg.discover(MODULE, (torch.ones(2, 6).double(),))


def test_the_cosine_is_that_of_weight_matching_and_does_not_see_scales() -> None:
    a, b = network(0), network(1)
    found = rg.align(a, b, SYMMETRY, method=rg.WeightMatching())
    before, after = (starts.cosine_of(a, other, SYMMETRY)["cosine"] for other in (b, found.params))
    assert after / before == pytest.approx(found.objective / found.initial)
    assert before < after < 1
    assert starts.cosine_of(a, a, SYMMETRY)["cosine"] == pytest.approx(1)
    scaled = SYMMETRY.act(SYMMETRY.random(torch.Generator().manual_seed(2), ("scale",)), b)
    assert starts.cosine_of(a, scaled, SYMMETRY)["cosine"] == pytest.approx(before, rel=1e-2)  # balanced to a tolerance


def test_weight_matching_continues_where_the_start_ends() -> None:
    a, b = network(0), network(1)
    ended = rg.align(a, b, SYMMETRY, method=rg.WeightMatching())
    continued = rg.align(a, b, SYMMETRY, method=starts.Continued(rg.WeightMatching()))
    assert continued.history[0] == pytest.approx(ended.objective)
    assert continued.objective >= ended.objective - 1e-9


def test_starts_are_drawn_by_steps_and_by_their_own_time() -> None:
    series = starts.series_of(Way("learned", rg.WeightMatching()), (1, 5))
    assert [way.method.steps for way in series["Naive"][1:]] == [1, 5]
    assert [way.method.init for way in series["learned"][1:]] == [rg.WeightMatching()] * 2
    rows = {
        "Naive": [Row("", {"barrier": [[2.0, 4.0]]}), Row("", {"barrier": [[1.0, 1.0]], "CPU s": [[3.0, 5.0]]})],
        "WM": [Row("", {"barrier": [[0.5]], "CPU s": [[1.0]]}), Row("", {"barrier": [[0.25]], "CPU s": [[2.0]]})],
    }
    by_steps, by_time = starts.draw_starts(rows, (7,))
    assert [(one.x, one.y) for one in by_steps.series] == [((0, 7), [3.0, 1.0]), ((0, 7), [0.5, 0.25])]
    assert [(one.x, one.y) for one in by_time.series] == [([4.0], [1.0]), ([1.0, 2.0], [0.5, 0.25])]


@pytest.mark.parametrize("name", reduced.REDUCED)
def test_notes_say_what_is_reduced(name: str) -> None:
    study = reduced.config("cpu", name=name)
    (population,), (note,) = study.lessons.populations, study.notes
    config, whole = population.config, reduced.WHOLE[name]
    assert f"reduced: {config.count} networks (the paper: {whole.count:,})" in note
    assert f"{study.lessons.matching.seconds:.0f} CPU seconds" in note
    if config.epochs is not None:
        assert re.search(rf"\b{config.epochs:.0f} epochs? \({whole.epochs:.0f}\)", note)
        return
    assert f"{config.steps} steps of {config.batch} images" in note
    divisor = {"a quarter": 4, "an eighth": 8}[note.split("with ")[1].split(" of the channels")[0]]
    plan, own = (one.architecture.settings["plan"] for one in (whole, config))
    assert own == [step if step == "pool" else step // divisor for step in plan][: len(own)]
    pixels = config.architecture.settings["image"]
    assert f"{pixels} x {pixels} pixels" in note
