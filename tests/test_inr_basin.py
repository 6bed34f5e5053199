"""Training along a line lowers the barrier, and hypernetworks have the paper's sizes."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import regauge as rg
from regauge.connect.straighten import FlatLine, StraightenConfig, line_loss, minibatches, straighten
from regauge.core.params import Params
from regauge.inr.embedding import CodeDecoder, Embedding, EmbeddingConfig, train_embedding
from regauge.inr.fields.signal_samples import Samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import fit
from regauge.inr.representation import Inr
from regauge.learn.hyper_matching import HyperMatchingConfig, hyper_match
from regauge.training import Adam, AdamW
from regauge.weightspace.row_encoder import RowEncoder, weight_rows

INR = Inr(width=16, depth=2)
TINY = HyperMatchingConfig(
    steps=100, batch=200, optimizer=AdamW(1e-2), code=16, widths=(16, 16), embedding=8, hidden=16, points=9
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ball(radius: float = 0.6, seed: int = 1) -> Samples:
    """Return labels that are one inside a ball and fall to zero outside."""
    points = torch.rand(800, 3, generator=seeded(seed)) * 2 - 1
    return Samples(points, torch.sigmoid(8 * (radius - points.norm(dim=1, keepdim=True))))


@cache
def pair() -> tuple[Params, Params, rg.Task]:
    """Return two networks of one ball with different initializations, and the task that evaluates them."""
    data, quick = ball(), FitConfig(steps=150, batch=200, optimizer=Adam(3e-3))
    found = [fit(INR, data, quick, start=INR.start(seeded(k)), generator=seeded(k)).params for k in (0, 1)]
    task = rg.Task(INR.module(), [(data.points, data.labels)], binary_cross_entropy_with_logits)
    return found[0], found[1], task


def copied(params: Params) -> Params:
    return {name: tensor.clone() for name, tensor in params.items()}


def run(name: str, seed: int = 0, steps: int = 100) -> FlatLine:
    a, b, task = pair()
    if name == "straighten":
        return straighten(
            a,
            b,
            task,
            StraightenConfig(steps=steps, batch=200, optimizer=AdamW(3e-3), points=9),
            generator=seeded(seed),
        )
    is_residual = name == "residual hyper-matching"
    config = replace(TINY, is_residual=is_residual, steps=steps)
    return hyper_match(a, b, task, config, generator=seeded(seed))


WAYS = ["straighten", "hyper-matching", "residual hyper-matching"]


@pytest.mark.parametrize("way", WAYS)
def test_the_barrier_falls_and_the_ends_stay_as_they_are(way: str) -> None:
    a, b, task = pair()
    before_a, before_b = copied(a), copied(b)
    found = run(way)
    assert found.before.barrier > 0.05
    assert found.after.barrier < 0.75 * found.before.barrier
    assert found.after.table[-1]["loss"] < found.before.table[-1]["loss"] + 0.2
    assert found.losses[-10:].mean() < found.losses[:10].mean()
    assert all(torch.equal(a[name], before_a[name]) and torch.equal(b[name], before_b[name]) for name in a)
    assert list(found.params) == list(a)
    assert all(t.shape == a[name].shape and t.dtype == a[name].dtype for name, t in found.params.items())
    assert not any(tensor.requires_grad for tensor in found.params.values())
    curve = rg.line(a, found.params, task, points=9)
    assert [row["loss"] for row in curve.table] == pytest.approx([row["loss"] for row in found.after.table])
    distance = math.sqrt(sum(float((a[name] - t).square().sum()) for name, t in found.params.items()))
    assert found.distance == pytest.approx(distance, rel=1e-5)
    assert found.approach == pytest.approx(1 - found.distance / found.distance_before)


@pytest.mark.parametrize("way", WAYS)
def test_results_depend_on_the_generator_alone(way: str) -> None:
    first, again, other = (run(way, seed, steps=5) for seed in (0, 0, 1))
    assert all(torch.equal(tensor, again.params[name]) for name, tensor in first.params.items())
    assert not all(torch.equal(tensor, other.params[name]) for name, tensor in first.params.items())


def test_training_from_an_aligned_network_moves_less_and_ends_lower() -> None:
    a, b, task = pair()
    symmetry = rg.discover(task.module, (torch.zeros(2, 3),))
    aligned = rg.align(a, b, symmetry, method=rg.ActivationMatching(), task=task, generator=seeded()).params
    config = StraightenConfig(steps=30, batch=200, optimizer=AdamW(1e-3), points=9)
    plain, found = (straighten(a, start, task, config, generator=seeded()) for start in (b, aligned))
    assert found.after.barrier < plain.after.barrier
    assert found.distance < plain.distance
    # It stays itself: nearly as far from the first network as it was, and nearer to where it began.
    assert found.moved < 0.5 * found.distance
    assert abs(found.approach) < 0.2


def test_the_whole_batch_at_the_ends_of_the_line() -> None:
    a, b, task = pair()
    batch = next(iter(task.batches))
    same = line_loss(task, a, a, batch, segments=4, generator=seeded())
    assert float(same) == pytest.approx(task.evaluate(a)["loss"], rel=1e-5)
    apart = line_loss(task, a, b, batch, segments=4, generator=seeded())
    curve = rg.line(a, b, task, points=41)
    offsets = torch.rand(4, generator=seeded(), dtype=torch.float64)
    losses = [
        task.evaluate({n: torch.lerp(t, b[n], (k + float(offsets[k])) / 4) for n, t in a.items()}) for k in range(4)
    ]
    expected = (sum(one["loss"] for one in losses) + curve.table[-1]["loss"]) / 5
    assert float(apart) == pytest.approx(expected, rel=1e-4)


def test_minibatches_keep_inputs_and_targets_together() -> None:
    inputs = torch.arange(30.0).reshape(-1, 1)
    task = rg.Task(nn.Identity(), [({"x": inputs}, 2 * inputs)], nn.functional.mse_loss)
    batches = minibatches(task, 7, seeded())
    first, second = next(batches), next(batches)
    for named, targets in (first, second):
        assert named["x"].shape == (7, 1)
        assert torch.equal(2 * named["x"], targets)
    assert not torch.equal(first[1], second[1])
    assert torch.equal(next(minibatches(task, None, seeded()))[1], 2 * inputs)
    uneven = rg.Task(nn.Identity(), [(inputs, inputs[:3])], nn.functional.mse_loss)
    with pytest.raises(ValueError, match="rows"):
        next(minibatches(uneven, 7, seeded()))


class Tied(nn.Module):
    """A network whose two layers are the same module, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.get_buffer("offset")
        outputs: Tensor = self.second(torch.tanh(self.first(x))) + offset
        return outputs


def test_any_network_tied_weights_and_buffers() -> None:
    torch.manual_seed(0)
    module = Tied()
    a, b = ({name: t + 0.0 for name, t in Tied().state_dict().items()} for _ in range(2))
    data = torch.randn(64, 3, generator=seeded())
    task = rg.Task(module, [(data, data)], nn.functional.mse_loss)
    found = straighten(
        a, b, task, StraightenConfig(steps=50, batch=None, optimizer=AdamW(1e-2), points=5), generator=seeded()
    )
    assert torch.equal(found.params["second.weight"], found.params["first.weight"])
    assert torch.equal(found.params["offset"], b["offset"])
    assert found.after.table[-1]["loss"] < found.before.table[-1]["loss"]


def test_rows_hold_the_weights() -> None:
    inr = Inr(width=5, depth=3)
    params = {name: torch.randn(2, *t.shape, generator=seeded()) for name, t in inr.start(seeded()).items()}
    every = weight_rows(params, "all")
    assert every.shape == (2, 3 * 5 + 1, 6)
    assert torch.equal(every[:, :5, :3], params["layers.0.weight"])
    assert not every[:, :5, 3:5].any()
    assert torch.equal(
        every[:, 5:10], torch.cat([params["layers.1.weight"], params["layers.1.bias"].unsqueeze(-1)], -1)
    )
    assert torch.equal(every[:, 15:], torch.cat([params["layers.3.weight"], params["layers.3.bias"].unsqueeze(-1)], -1))
    hidden = weight_rows(params, "hidden")
    assert hidden.shape == (2, 2 * 6, 5)
    assert torch.equal(hidden[:, 5], params["layers.1.bias"])
    assert torch.equal(hidden[:, 6:11], params["layers.2.weight"])


def test_sizes_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        params = dict(Inr().module().state_dict())
        encoders = {columns: RowEncoder(columns) for columns in (512, 513)}
        decoder = CodeDecoder(3, 1)
    assert weight_rows(params, "all").shape == (2049, 513)
    assert weight_rows(params, "hidden").shape == (1539, 512)
    assert {columns: counted(module) for columns, module in encoders.items()} == {512: 3_155_968, 513: 3_156_480}
    assert counted(decoder) == 2_165_249
    with torch.device("meta"):
        whole = HyperMatchingConfig().network(params)
    assert counted(whole.encoder) == 3_156_480
    assert counted(whole) == 5_159_489


def counted(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_residual_network_begins_at_its_input_and_a_plain_one_at_its_size() -> None:
    _, b, _ = pair()
    residual = replace(TINY, is_residual=True).network(b, seeded())
    assert all(torch.equal(tensor, b[name]) for name, tensor in residual(b).items())
    wide = Inr(width=64).start(seeded())
    made = HyperMatchingConfig(widths=(32,), code=32).network(wide, seeded())(wide)
    for name, tensor in wide.items():
        if tensor.numel() > 1:
            assert float(made[name].detach().square().mean() / tensor.square().mean()) == pytest.approx(1, rel=0.6)


@cache
def embedding() -> tuple[Embedding, Params]:
    """Return an encoder of networks of balls of two sizes, with one initialization."""
    inr = Inr(width=12, depth=3)
    data = [ball(radius, seed) for seed, radius in enumerate((0.4, 0.8) * 4)]
    quick = FitConfig(steps=60, batch=200, optimizer=Adam(3e-3))
    fits = [fit(inr, one, quick, start=inr.start(seeded()), generator=seeded(9)).params for one in data]
    params = {name: torch.stack([one[name] for one in fits]) for name in fits[0]}
    config = EmbeddingConfig(
        epochs=40, batch=4, optimizer=AdamW(3e-3), examples=100, code=16, widths=(24, 24), width=24, octaves=2
    )
    return train_embedding(inr, params, data, config, generator=seeded()), params


def test_codes_say_which_signal_it_is() -> None:
    found, params = embedding()
    assert found.losses.shape == (80,)
    assert found.losses[-10:].mean() < found.losses[:10].mean()
    codes = found.codes(params)
    assert codes.shape == (8, 16)
    one, same, other = ({name: t[k] for name, t in params.items()} for k in (0, 2, 1))
    assert torch.allclose(found.codes(one), codes[0], atol=1e-5)
    assert found.distance(one, same) < found.distance(one, other)
    assert found.distance(one, one) == 0
    points = torch.tensor([[0.0, 0.0, 0.6]])
    assert found.decode(codes[0], points).shape == (1, 1)
    assert found.decode(codes[0], points) < found.decode(codes[1], points)


def test_codes_do_not_stand_permutations_of_columns() -> None:
    found, params = embedding()
    one = {name: t[0] for name, t in params.items()}
    symmetry = rg.discover(Inr(width=12, depth=3).module(), (torch.zeros(2, 3),))
    moved = symmetry.act(symmetry.random(seeded(), ("permutation",)), one)
    assert found.distance(one, moved) > 1e-3


def test_bad_input() -> None:
    a, b, task = pair()
    for config in (StraightenConfig, HyperMatchingConfig):
        with pytest.raises(ValueError, match="the one given must be positive"):
            config(steps=0)
        with pytest.raises(ValueError, match="cannot train"):
            config(points=2)
    with pytest.raises(ValueError, match="a batch needs two networks"):
        EmbeddingConfig(batch=1)
    broken = {**b, "layers.0.weight": b["layers.0.weight"] * math.nan}
    with pytest.raises(ValueError, match="second network"):
        straighten(a, broken, task, generator=seeded())
    with pytest.raises(ValueError, match="different parameters"):
        straighten(a, {"x": a["layers.0.weight"]}, task, generator=seeded())
    with pytest.raises(ValueError, match="smaller lr"):
        straighten(a, b, task, StraightenConfig(steps=30, batch=50, optimizer=AdamW(1e30)), generator=seeded())
    with pytest.raises(ValueError, match="not those of an MLP"):
        weight_rows({"conv.weight": torch.zeros(3, 3, 3, 3)}, "all")
    with pytest.raises(ValueError, match="no layer between"):
        weight_rows(Inr(width=4, depth=1).start(seeded()), "hidden")
    found, _ = embedding()
    with pytest.raises(ValueError, match="width 12, not 16"):
        found.codes(b)
    with pytest.raises(ValueError, match="samples of each"):
        train_embedding(INR, {name: t.unsqueeze(0) for name, t in a.items()}, [ball()], generator=seeded())
