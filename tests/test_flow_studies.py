"""Studies of flows: networks that begin alike, pairs that are aligned, pictures of images."""

import json
from dataclasses import asdict

import numpy as np
import torch

import regauge as rg
from regauge.core.interpolation import distance
from regauge.core.params import select
from regauge.nets.mlp import mlp
from regauge.papers.flows import barriers, signals
from regauge.papers.table import Images
from regauge.report.figures import picture_figure


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


def test_the_nearest_image_is_found_and_spread_is_within_classes() -> None:
    known = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    distances, numbers = signals._nearest(torch.tensor([[1.0, 0.5], [5.0, 4.0]]), known)
    assert distances.tolist() == [0.5, 1.0]
    assert numbers.tolist() == [1, 2]
    # Classes far from one another, each with two images one apart.
    classes = [torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[9.0, 9.0], [9.0, 8.0]])]
    assert float(signals._spread(classes)) == 1.0
