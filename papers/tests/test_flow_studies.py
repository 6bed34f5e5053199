"""Studies of flows: networks with a common initialization, aligned pairs, and pictures of images."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.text import Text

import regauge as rg
from regauge.core.interpolation import distance
from regauge.core.params import select
from regauge.flow.alignment import align_points
from regauge.flow.components import Components
from regauge.nets.mlp import mlp
from regauge.report.figures import picture_figure
from regauge.report.pictures import Chart, Images
from regauge.zoo import load_examples
from regauge_papers.experiment import Run
from regauge_papers.flows import barriers, cnns, folds, quality, signals, studies, transfer
from regauge_papers.flows.networks import Networks, fewer
from regauge_papers.table import Table


def test_pairs_of_copies_have_no_barrier_once_they_are_aligned() -> None:
    module = mlp(5, 6, 6, 2)
    symmetry = rg.discover(module, (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),))
    one = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    chance = torch.Generator().manual_seed(1)
    moves = symmetry.random(chance, ("permutation",), (5,))
    copies = symmetry.act(moves, {name: tensor.expand(5, *tensor.shape) for name, tensor in one.items()})
    assert all(distance(select(copies, 0), select(copies, k)) > 0.1 for k in range(1, 5))
    for label in ("aligned to one network", "aligned to their middle", "scaled, then aligned to their middle"):
        aligned = barriers._align(label, copies, symmetry)
        assert all(distance(select(aligned, 0), select(aligned, k)) < 1e-5 for k in range(1, 5)), label
    assert barriers._align("as trained", copies, symmetry) is copies


def test_barriers_are_above_the_mean_of_both_ends() -> None:
    losses, ends = torch.tensor([1.0, 2.0, 4.0, 1.0]), torch.tensor([1.0, 1.5, 1.0, 2.0])
    found = barriers._summary(losses, torch.tensor([0.5, 0.5, 0.0, 1.0]), ends)
    assert found["loss halfway"] == 2.0
    assert found["barrier"] == (0 + 0.5 + 3 - 1) / 4
    assert found["pairs with a barrier above 0.01"] == 0.5
    assert found["accuracy halfway"] == 0.5
    assert (found["curve"][0], found["curve"][50], found["curve"][-1]) == (1.0, 1.5, 4.0)


def test_flows_to_populations_of_one_architecture_are_kept_apart(tmp_path: Path) -> None:
    run = Run("smoke", 0, tmp_path)
    studies = cnns.config("smoke"), cnns.from_one_start("smoke")
    fitted = studies[0].flows[0]
    assert fitted == studies[1].flows[0]
    made = [Networks.of(s.name, s.population, run).fit(fitted.label, fitted.settings) for s in (*studies, studies[0])]
    first, other, again = (flow.draw_starts(3, torch.Generator().manual_seed(0)) for flow in made)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert distance(other, first) > 0.1


def test_images_are_kept_and_stand_where_they_belong() -> None:
    values = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    sheet = Images.of("a sheet", ["first", "second"], list("abc"), values)
    assert Images.from_json(json.loads(json.dumps(asdict(sheet)))) == sheet
    (drawn,) = picture_figure((sheet,)).axes[0].images
    whole = np.asarray(drawn.get_array())
    assert whole.shape == (2 * 6, 3 * 7)
    for r in range(2):
        for c in range(3):
            wanted = (values[r, c] * 255).round().numpy()
            assert (sheet.image(r, c) == wanted).all()
            assert (whole[6 * r + 1 : 6 * r + 5, 7 * c + 1 : 7 * c + 6] == wanted).all()


def test_losses_by_steps_stay_readable_beside_one_that_is_far_away() -> None:
    curves = {"near": [0.05, 0.06], "far": [54.0, 0.06], "thesis' flow, its sampler": [3.0, 0.1]}
    ours, theirs = quality._draw("ours", "steps", "loss", (2, 100), curves)
    assert isinstance(ours, Chart)
    assert isinstance(theirs, Chart)
    assert ([one.label for one in ours.series], [one.label for one in theirs.series]) == (
        ["near", "far"],
        ["thesis' flow"],
    )
    axes = picture_figure((ours, theirs)).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert {"0.1", "1", "10"} <= {label.get_text() for label in axes.get_yticklabels()}
    (averages,) = quality._draw("ours", "networks", "accuracy", (2, 100), {"near": [0.9, 0.95]})
    assert picture_figure((averages,)).axes[0].get_yscale() == "linear"


def test_long_names_and_many_stand_at_the_ends_of_their_lines_within_the_picture() -> None:
    records = Path(__file__).parents[2] / "docs" / "records"
    for name in ("004-resnet20-cpu", "000-mnist-cpu", "000-folds-cpu"):
        for picture in Table.from_json(json.loads((records / f"{name}.json").read_text())).pictures.values():
            figure = picture_figure(picture)
            assert figure.get_figwidth() < 11
            figure.draw_without_rendering()
            for axes, panel in zip(figure.axes, picture, strict=True):
                assert isinstance(panel, Chart)
                names = [one.label for one in panel.series if one.label]
                assert sorted(one.get_text().replace("\n", " ") for one in axes.texts) == sorted(names)
                boxes = sorted((Text.get_window_extent(one) for one in axes.texts), key=lambda box: box.y0)
                assert all(axes.bbox.x1 < box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
                assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))
                assert boxes[0].y0 >= 0
                assert boxes[-1].y1 <= figure.bbox.y1
                # The order of names is that of the ends of their lines, as drawn: no two leaders cross.
                ends = [axes.transData.transform(one.xy)[1] for one in axes.texts]  # type: ignore[attr-defined]
                middles = [Text.get_window_extent(one).y0 + Text.get_window_extent(one).y1 for one in axes.texts]
                inside = [k for k, end in enumerate(ends) if axes.bbox.y0 <= end <= axes.bbox.y1]
                by_end = sorted(inside, key=lambda k: ends[k])
                assert all(ends[a] == ends[b] or middles[a] < middles[b] for a, b in pairwise(by_end))


def test_names_of_axes_lie_within_the_picture() -> None:
    record = json.loads((Path(__file__).parents[2] / "docs" / "records" / "000-mnist-cpu.json").read_text())
    for picture in Table.from_json(record).pictures.values():
        figure = picture_figure(picture)
        figure.draw_without_rendering()
        for axes in figure.axes:
            for text in (axes.xaxis.label, axes.yaxis.label):
                box = text.get_window_extent()
                assert min(box.x0, box.y0) >= 0
                assert box.x1 <= figure.bbox.x1
                assert box.y1 <= figure.bbox.y1


def test_the_nearest_image_is_found_and_spread_is_within_classes() -> None:
    known = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    distances, numbers = signals._nearest(torch.tensor([[1.0, 0.5], [5.0, 4.0]]), known)
    assert distances.tolist() == [0.5, 1.0]
    assert numbers.tolist() == [1, 2]
    # Classes far from one another, each with two images one apart.
    classes = [torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[9.0, 9.0], [9.0, 8.0]])]
    assert float(signals._spread(classes)) == 1.0


def test_networks_whose_rest_is_drawn_anew_keep_their_components(tmp_path: Path) -> None:
    study = studies.mnist("smoke")
    networks = Networks.of(study.name, study.population, Run("smoke", 0, tmp_path))
    comparison = quality.Comparison(study, networks)
    components = networks.fit("components 0", study.flows[0].settings).space
    assert isinstance(components, Components)
    space = components.networks
    before = align_points(space, components.mean.float(), space.enter(comparison.held_out))
    after = space.enter(comparison._with_rest_anew(components))
    assert torch.allclose(components.reduce(after), components.reduce(before), atol=1e-3)
    assert not torch.allclose(after, before, atol=0.1)


def test_guidance_sees_what_networks_were_trained_on_and_no_other_case(tmp_path: Path) -> None:
    networks = Networks.of("few", fewer(studies.uci("smoke").population, 2, 1), Run("smoke", 0, tmp_path))
    known = load_examples("breast-cancer")
    ((inputs, classes),) = networks.task("learned").batches
    assert torch.equal(inputs, known.inputs)
    assert torch.equal(classes, known.targets)
    sizes = {part: len(networks.task(part).batches[0][0]) for part in ("learned", "train", "test")}  # type: ignore[arg-type, index]
    assert sizes == {"learned": 410, "train": 455, "test": 114}


def test_each_case_that_is_learned_is_left_out_once() -> None:
    known = load_examples("breast-cancer")
    thirds = [make() for make in (folds.first, folds.second, folds.third)]
    for third in thirds:
        assert len(third.inputs) + len(third.validation_inputs) == len(known.inputs)
        both = torch.cat([third.inputs, third.validation_inputs])
        assert torch.equal(both[:, 0].sort().values, known.inputs[:, 0].sort().values)
    rest = torch.cat([third.validation_inputs for third in thirds])
    assert len(rest.unique(dim=0)) == len(known.inputs)
    assert torch.equal(rest[:, 0].sort().values, known.inputs[:, 0].sort().values)


def test_every_table_of_flows_has_rows_with_transport_and_with_alignment() -> None:
    for study in (studies.uci("cpu"), studies.mnist("cpu")):
        assert len({drawing.label for fitted in study.flows for drawing in fitted.drawings}) == sum(
            len(fitted.drawings) for fitted in study.flows
        )
        guided = [f for f in study.flows if f.label in studies.KINDS and any(d.strength for d in f.drawings)]
        for fitted in guided:  # of the flows that are drawn without guidance, too
            assert sum(other.settings == fitted.settings for other in study.flows) == 2
        assert [fitted.label for fitted in guided] == [*studies.KINDS]
        by_coupling = {fitted.label: fitted.settings.coupling for fitted in study.flows}
        assert sum(coupling.assignment for coupling in by_coupling.values()) == 3
        aligned = [label for label, coupling in by_coupling.items() if coupling.alignment]
        assert aligned == [f"{kind}, each end aligned to its start" for kind in ("euclidean", "geometric")]
        printed = {d.label: d.paper[:2] for fitted in study.flows for d in fitted.drawings if d.paper}
        best = printed["thesis' geometric flow, aligned, optimal transport, its sampler"]
        assert best == (("0.991", "0.020") if study.name == "uci" else ("0.786", "1.443"))


def test_flows_of_the_thesis_that_are_used_elsewhere_are_those_of_the_table() -> None:
    known = [(f"{fitted.label} 0", fitted.settings) for fitted in studies.mnist("cpu").flows]
    study = transfer.config("cpu")
    assert study.population == studies.mnist("cpu").population
    assert [source.kind for source in study.thesis] == [*studies.KINDS]
    for source in study.thesis:
        assert (source.label, source.settings) in known


def test_curves_stand_in_a_panel_for_each_way_of_drawing() -> None:
    curves = {
        "flow": [1.0, 2.0],
        "flow, guided, strength 3": [1.0, 1.5],
        "thesis' flow, its sampler": [3.0, 4.0],
        "thesis' flow, aligned, its sampler": [3.0, 5.0],
        "thesis' flow, its equation": [5.0, 6.0],
    }
    panels = [panel for panel in quality._draw("Steps", "steps", "loss", (2, 5), curves) if isinstance(panel, Chart)]
    found = {panel.title: {one.label: list(one.y) for one in panel.series} for panel in panels}
    assert found == {
        "Steps": {"flow": [1.0, 2.0], "flow, guided, strength 3": [1.0, 1.5]},
        "Thesis' flows, its sampler": {"thesis' flow": [3.0, 4.0], "thesis' flow, aligned": [3.0, 5.0]},
        "Thesis' flows, its equation": {"thesis' flow": [5.0, 6.0]},
    }
