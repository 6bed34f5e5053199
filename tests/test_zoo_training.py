"""Training of populations: network i is the same for any division of the population, and equals plain torch
training.
"""

import functools
import itertools
import json
import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from progress import Recorded
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.params import Params
from regauge.data.images import digits
from regauge.storage.architecture import Architecture
from regauge.training import SGD, Adam, AdamW, Choice, Cosine, Initialization, LogUniform, OneCycle, Uniform, stacks
from regauge.training.programs import Backend
from regauge.zoo import Checkpoints, ClassHalves, Discard, Examples, Fraction, PopulationConfig, load_examples, train
from regauge.zoo.jobs.train_shards import settings_of
from regauge.zoo.training import trainer
from regauge.zoo.training.config import Subset
from regauge.zoo.training.examples import require_trainable
from regauge.zoo.training.stack_state import Feed, SavedNetworks
from regauge.zoo.training.trainer import cut


class Branchless(nn.Module):
    """A network that is not a chain: a residual connection, normalization and a convolution, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.softplus(self.bn(self.conv(x)))
        result: Tensor = self.head((h + x).mean((2, 3)))
        return result


class Two(nn.Linear):
    """A module with two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, super().forward(x)


class Hooked(nn.Sequential):
    """A chain with a hook."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self[0].register_forward_hook(lambda _, __, output: 3 * output)


class Dropping(nn.Module):
    """A module that uses random numbers in training, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.head, self.drop = nn.Conv2d(1, 4, 1), nn.Linear(4, 3), nn.Dropout(0.5)
        self.memory = nn.LSTM(1, 4, num_layers=2, dropout=1e-3, batch_first=True)
        self.how, self.random = how, random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "convolution":
            h = functional.dropout(self.conv(x), 1e-3, self.training).mean((2, 3))
        elif self.how == "memory":
            h = self.memory(x.unsqueeze(2))[0][:, -1]
        elif self.how == "module":
            h = self.drop(x)
        else:
            h = x + self.random.random() if self.training else x
        result: Tensor = self.head(h)
        return result


def classes(*shape: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(3, *shape, generator=generator)
    labels = torch.randint(3, (50,), generator=generator)
    inputs = centers[labels] + 0.5 * torch.randn(50, *shape, generator=generator)
    return Examples("blobs", inputs[:40], labels[:40], inputs[40:], labels[40:])


def signals() -> Examples:
    points = torch.linspace(-1, 1, 20)[:, None]
    values = torch.stack([torch.sin(a * points) for a in (1.0, 2.0, 3.0)])
    return Examples("waves", points, values, points, values, is_signals=True)


MLP = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 6, 3]})
SIREN = Architecture("SIREN", "regauge.nets.siren:Siren", {"in_features": 1, "width": 5, "omega": 3.0})
CONV = Architecture("CNN", f"{__name__}:Branchless", {})
TWO = Architecture("two", f"{__name__}:Two", {"in_features": 4, "out_features": 3})
MAPS = Architecture("maps", "torch.nn:Conv2d", {"in_channels": 1, "out_channels": 3, "kernel_size": 1})
SMALL = Architecture("small CNN", "regauge.zoo.formats.modules:SmallCNN", {"channels": [1, 4, 3], "classes": 3})
BLOBS, IMAGES, WAVES = classes(4), classes(1, 5, 5), signals()
LARGER = classes(1, 8, 8)


def config(architecture: Architecture = MLP, data: str = "blobs", count: int = 10, **changes: Any) -> PopulationConfig:
    given = {"seed": 3, "steps": 12, "batch": 8, "optimizer": SGD(lr=0.1, momentum=0.5), "group": 4} | changes
    return PopulationConfig(architecture, data, count, **given)


KINDS = Initialization(("factory", "isotropic", "he", "glorot", "orthogonal", "normal"), Uniform(0.2, 1.0))
CASES: dict[str, tuple[PopulationConfig, Examples]] = {
    "mlp": (config(optimizer=Adam(lr=LogUniform(1e-3, 1e-1), weight_decay=Choice((0.0, 0.1)))), BLOBS),
    "same settings": (config(optimizer=AdamW(lr=0.01), schedule=OneCycle()), BLOBS),
    "all examples": (config(batch=None, optimizer=SGD(lr=0.1, momentum=Uniform(0.0, 0.9))), BLOBS),
    "own orders": (config(group=1), BLOBS),
    "fractions": (config(subset=Fraction(Choice((0.3, 0.6)))), BLOBS),
    "halves": (config(subset=ClassHalves(), steps=None, epochs=2.5), BLOBS),
    "initialization": (config(initialization=KINDS), BLOBS),
    "one start": (config(initialization=replace(KINDS, is_common=True), group=1), BLOBS),
    "hooks": (config(Architecture("hooked", f"{__name__}:Hooked", {})), BLOBS),
    "siren": (config(SIREN, batch=None, copies=2, schedule=Cosine()), WAVES),
    "siren, sampled": (config(SIREN, batch=7, copies=2), WAVES),
    "cnn": (config(CONV, count=6), IMAGES),
    "cnn, own orders": (config(CONV, count=6, group=1, optimizer=Adam(lr=0.01)), IMAGES),
    "small cnn": (config(SMALL, count=6, optimizer=Adam(lr=LogUniform(1e-3, 1e-1))), LARGER),
    "cnn, all examples": (config(CONV, count=6, batch=None), IMAGES),
}


def trained(
    config: PopulationConfig, data: Examples, **how: Any
) -> tuple[dict[tuple[int, int], Params], dict[tuple[int, int], dict[str, Any]]]:
    """Return networks and rows by (id, step)."""
    return collected(train(config, data=data, dtype=torch.float64, **how))


def collected(blocks: Iterable[SavedNetworks]) -> tuple[dict[Any, Params], dict[Any, dict[str, Any]]]:
    networks, rows = {}, {}
    for block in blocks:
        for k, row in enumerate(block.rows):
            key = (row["id"], row["step"])
            assert key not in networks
            networks[key] = {name: tensor[k] for name, tensor in block.params.items()}
            rows[key] = row
    return networks, rows


def assert_same(a: Mapping[Any, Params], b: Mapping[Any, Params], tolerance: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for key, params in a.items():
        assert params.keys() == b[key].keys()
        for name, tensor in params.items():
            torch.testing.assert_close(tensor, b[key][name], rtol=tolerance, atol=tolerance, msg=f"{key} {name}")


@pytest.mark.parametrize("name", CASES)
def test_a_network_does_not_depend_on_how_the_population_is_cut(name: str) -> None:
    config, data = CASES[name]
    whole, rows = trained(config, data)
    assert sorted(k for k, _ in whole) == list(range(config.count))
    apart, own_rows = trained(config, data, stack=3)
    assert_same(whole, apart)
    some, _ = trained(config, data, ids=[5, 1, 2])
    assert_same({key: whole[key] for key in some}, some)
    for key, row in rows.items():
        assert own_rows[key].keys() == row.keys()
        for field, value in row.items():
            assert own_rows[key][field] == (pytest.approx(value, rel=1e-8) if isinstance(value, float) else value)
        assert json.loads(json.dumps(row, allow_nan=False)) == row
    first, second = (whole[key] for key in sorted(whole)[:2])
    assert any(not torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_back_ends_agree(name: str, backend: Backend) -> None:
    config, data = CASES[name]
    assert_same(trained(config, data, backend=backend)[0], trained(config, data)[0])


@pytest.mark.parametrize("name", ["mlp", "siren, sampled", "all examples", "siren", "own orders", "small cnn"])
def test_any_module_is_trained_as_chains_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, data = CASES[name]
    expected, _ = trained(config, data)
    monkeypatch.setattr("regauge.training.stacks.steps_of", lambda module, **_: None)
    assert_same(expected, trained(config, data, backend="stacked")[0])


class Comparing(nn.Module):
    """A module that compares the examples of a batch, without a layer that shows this."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).mean((2, 3))
        result: Tensor = self.head(torch.tanh(h - h.mean(0)))
        return result


@pytest.mark.parametrize("name", ["Comparing", "Branchless", "Plain"])
def test_batches_are_read_in_pieces_only_where_that_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"channels": [1, 4, 4], "classes": 3, "activation": "tanh"}
    plain = Architecture("plain", "regauge.zoo.formats.modules:SmallCNN", settings)
    architecture = plain if name == "Plain" else Architecture(name, f"{__name__}:{name}", {})
    data = classes(1, 7, 7)
    batch = data.inputs[:8]
    chosen = config(architecture, count=3)
    expected, rows = trained(chosen, data)
    monkeypatch.setattr(stacks, "PIECE_BYTES", 500)
    module = architecture.module()
    found = stacks.LoopEngine(module).count_pieces(dict(module.state_dict()), batch)
    assert (found > 1) == (name == "Plain")
    networks, own_rows = trained(chosen, data)
    assert_same(expected, networks)
    assert own_rows[1, 12]["train_loss"] == pytest.approx(rows[1, 12]["train_loss"], rel=1e-9)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.memory(x.unsqueeze(2))[0][:, -1])
        return result


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) * torch.sigmoid(self.b(x))
        return result


class PartlyFrozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self[0].weight.requires_grad_(False)


def test_recurrent_layers_are_trained_one_by_one() -> None:
    chosen = config(Architecture("GRU", f"{__name__}:Recurrent", {}), count=3)
    assert_same(trained(chosen, BLOBS)[0], trained(chosen, BLOBS, stack=1)[0])


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_frozen_parameters_stay(backend: Backend) -> None:
    chosen = config(Architecture("frozen", f"{__name__}:PartlyFrozen", {}), checkpoints=Checkpoints(100))
    networks, _ = trained(chosen, BLOBS, backend=backend)
    for network in range(chosen.count):
        assert torch.equal(networks[network, 0]["0.weight"], networks[network, 12]["0.weight"])
        assert not torch.equal(networks[network, 0]["0.bias"], networks[network, 12]["0.bias"])
    assert_same(networks, trained(chosen, BLOBS)[0])


def test_a_network_is_what_plain_torch_makes_of_it() -> None:
    config, data = CASES["mlp"]
    networks, rows = trained(config, data)
    data = data.to("cpu", torch.float64)
    for network in (0, 7):
        row = rows[network, 12]
        torch.manual_seed(row["seed"])
        module = MLP.module().double()
        optimizer = torch.optim.Adam(module.parameters(), lr=row["lr"], weight_decay=row["weight_decay"])
        feed = Feed(config, data, network // 4)
        for step in range(12):
            index = feed.indices(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(data.inputs[index]), data.targets[index])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        # The generator gives float32 values whatever the dtype of training.
        assert_same({0: dict(module.state_dict())}, {0: networks[network, 12]}, 1e-9)
        assert row["train_loss"] == pytest.approx(loss.item(), rel=1e-9)
        outputs = module(data.validation_inputs)
        expected = functional.cross_entropy(outputs, data.validation_targets).item()
        assert row["validation_loss"] == pytest.approx(expected, rel=1e-9)
        assert row["validation_accuracy"] == (outputs.argmax(1) == data.validation_targets).double().mean().item()


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    first, _ = trained(*CASES["mlp"])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    torch.manual_seed(6)
    second, _ = trained(*CASES["mlp"])
    assert all(torch.equal(first[k][name], second[k][name]) for k in first for name in first[k])
    other, _ = trained(replace(CASES["mlp"][0], seed=4), BLOBS)
    assert not torch.equal(other[0, 12]["layers.0.weight"], first[0, 12]["layers.0.weight"])


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_divergence_does_not_spread(name: str, backend: Backend) -> None:
    config, data = CASES[name]
    calm = replace(config, optimizer=SGD(lr=Choice((0.05,))))
    wild = replace(config, optimizer=SGD(lr=Choice((0.05, 1e200))), checkpoints=Checkpoints(5))
    networks, rows = trained(wild, data, backend=backend)
    diverged = {k for (k, _), row in rows.items() if row["is_diverged"]}
    assert diverged == {k for (k, _), row in rows.items() if row["lr"] > 1}
    assert 0 < len(diverged) < config.count
    expected, _ = trained(calm, data, backend=backend)
    healthy = {key: params for key, params in networks.items() if key[1] == 12}
    assert {k for k, _ in healthy} == set(range(config.count)) - diverged
    assert_same({key: expected[key] for key in healthy}, healthy)
    for k in diverged:
        assert [step for (other, step) in rows if other == k] == [0, 5]
        assert rows[k, 5]["train_loss"] is None
        assert not all(tensor.isfinite().all() for tensor in networks[k, 5].values())
        json.dumps(rows[k, 5], allow_nan=False)


def test_checkpoints_lie_on_one_trajectory() -> None:
    config, data = CASES["same settings"]
    networks, rows = trained(replace(config, checkpoints=Checkpoints(4, warmup=2)), data)
    assert {step for _, step in networks} == {2, 6, 10, 12}
    assert len(networks) == 4 * config.count
    final, _ = trained(config, data)
    assert_same(final, {key: params for key, params in networks.items() if key[1] == 12})
    start, _ = trained(replace(config, checkpoints=Checkpoints(100)), data)
    assert {step for _, step in start} == {0, 12}
    assert start[0, 0].keys() == final[0, 12].keys()
    torch.manual_seed(rows[3, 12]["seed"])
    drawn = MLP.module().state_dict()
    assert all(torch.equal(drawn[name].double(), tensor) for name, tensor in start[3, 0].items())


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("stack", [4, 100])
def test_early_discarding_of_a_share(backend: Backend, stack: int) -> None:
    config, data = CASES["mlp"]
    rule = (Discard(4, worst=0.5), Discard(8, worst=0.75))
    watched = replace(config, checkpoints=Checkpoints(4), discards=rule)
    networks, rows = trained(watched, data, backend=backend, stack=stack)
    _, undisturbed = trained(replace(config, checkpoints=Checkpoints(4)), data)
    for group in range(3):
        ids = range(4 * group, min(10, 4 * group + 4))
        after_4 = {k for k in ids if (k, 8) in rows}
        losses = {k: undisturbed[k, 4]["validation_loss"] for k in ids}
        assert after_4 == set(sorted(ids, key=lambda k: losses[k])[: len(ids) - len(ids) // 2])
        assert {k for k in ids if rows[k, 4]["is_discarded"]} == set(ids) - after_4
        after_8 = {k for k in ids if (k, 12) in rows}
        assert {k for k in after_4 if rows[k, 8]["is_discarded"]} == after_4 - after_8
        assert len(after_8) == len(ids) - int(0.75 * len(ids))
        assert after_8 <= after_4
    assert_same({key: trained(config, data)[0][key] for key in networks if key[1] == 12},
                {key: params for key, params in networks.items() if key[1] == 12})  # fmt: skip
    with pytest.raises(ValueError, match="worst of group 0 can only be found in the whole group, ids 0 to 3"):
        next(train(watched, data=data, ids=[0, 1]))


@pytest.mark.parametrize("name", ["mlp", "siren, sampled", "siren", "cnn"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_early_discarding_above_a_loss(name: str, backend: Backend) -> None:
    config, data = CASES[name]
    between, rows = trained(replace(config, checkpoints=Checkpoints(6)), data)
    losses = sorted(row["validation_loss"] for (_, step), row in rows.items() if step == 6)
    limit = (losses[config.count // 2] + losses[config.count // 2 + 1]) / 2
    networks, own_rows = trained(replace(config, discards=(Discard(6, above=limit),)), data, backend=backend)
    expected = {key: params for key, params in between.items() if key[1] == 6} | trained(config, data)[0]
    kept = {k for k, step in rows if step == 6 and rows[k, 6]["validation_loss"] <= limit}
    assert networks.keys() == {(k, 12 if k in kept else 6) for k in range(config.count)}
    assert all(own_rows[k, step]["is_discarded"] == (k not in kept) for k, step in networks)
    assert_same({key: expected[key] for key in networks}, networks)
    _, none = trained(replace(config, discards=(Discard(6, above=-1.0),)), data, backend=backend)
    assert none.keys() == {(k, 6) for k in range(config.count)}
    assert all(row["is_discarded"] for row in none.values())
    _, at_the_end = trained(replace(config, discards=(Discard(12, above=-1.0),)), data, backend=backend)
    assert at_the_end.keys() == {(k, 12) for k in range(config.count)}
    assert all(row["is_discarded"] for row in at_the_end.values())


@pytest.mark.parametrize("backend", ["loop", "stacked", "compiled"])
@pytest.mark.parametrize("rule", [{"above": 1.1}, {"worst": 0.75}], ids=str)
def test_what_was_given_up_is_handed_out_once(
    backend: Backend, rule: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr(trainer, "_has_compiler", lambda: True)
    wild = config(count=12, optimizer=SGD(lr=Choice((0.01, 0.02, 1e200))), discards=(Discard(5, **rule),))
    _, rows = trained(wild, BLOBS, backend=backend)
    diverged = {key for key, row in rows.items() if row["is_diverged"]}
    discarded = {key for key, row in rows.items() if row["is_discarded"]}
    assert diverged == {(k, 5) for (k, _), row in rows.items() if row["lr"] > 1}
    assert sorted(k for k, _ in rows) == list(range(12))
    assert {step for _, step in discarded} == {5}
    told = Recorded()
    for _ in train(wild, data=BLOBS, backend=backend, advance=told.advance):
        pass
    assert sum(told.amounts) == pytest.approx(12)
    assert len(told.amounts) >= 12  # after each step
    assert not diverged & discarded
    assert 0 < len(diverged | discarded) < 12
    assert all(step == 12 for _, step in rows.keys() - diverged - discarded)
    _, watched = trained(replace(wild, checkpoints=Checkpoints(5, warmup=5)), BLOBS, backend=backend)
    assert {key: row for key, row in watched.items() if key in rows} == rows
    assert watched.keys() - rows.keys() == {(k, step) for k, end in rows for step in (5, 10) if step < end}


def test_batches_read_every_example_equally_often() -> None:
    feed = Feed(config(batch=7), BLOBS, 0)
    read = torch.cat([feed.indices(step) for step in range(40)])
    assert read.bincount(minlength=40).tolist() == [7] * 40
    for epoch in range(7):
        assert sorted(read[40 * epoch : 40 * epoch + 40].tolist()) == list(range(40))
    assert not torch.equal(read[:40], read[40:80])
    again = Feed(config(batch=7), BLOBS, 0)
    assert torch.equal(again.indices(29), feed.indices(29))
    assert not torch.equal(Feed(config(batch=7), BLOBS, 1).indices(0), again.indices(0))


def test_halves_of_the_classes_are_disjoint() -> None:
    labels = torch.arange(4000) % 10
    data = Examples("ten", torch.zeros(4000, 1), labels, torch.zeros(1, 1), labels[:1])
    halves = [ClassHalves().choose(data, 0, group) for group in range(4)]
    first, second = halves[0], halves[1]
    assert sorted(torch.cat([first, second]).tolist()) == list(range(4000))
    assert labels[first].bincount().tolist() == [380] * 5 + [20] * 5
    assert labels[second].bincount().tolist() == [20] * 5 + [380] * 5
    for group in (2, 3):
        assert torch.equal(halves[group], halves[group - 2])
    with pytest.raises(ValueError, match="has no classes to be halved"):
        ClassHalves().choose(WAVES, 0, 0)


def test_fractions_are_of_the_size_that_the_row_tells() -> None:
    chosen, data = CASES["fractions"]
    _, rows = trained(chosen, data)
    for (network, _), row in rows.items():
        assert chosen.subset is not None
        own = chosen.subset.choose(data, chosen.seed, network // 4)
        assert len(own) == round(40 * row["share"]) == len(own.unique())
    assert len({row["share"] for row in rows.values()}) == 2


def test_networks_that_are_signals_learn_their_own() -> None:
    chosen = config(SIREN, count=8, batch=None, copies=2, steps=400, optimizer=Adam(lr=1e-2))
    networks, rows = trained(chosen, WAVES)
    module = SIREN.module().double()
    for (network, _), params in networks.items():
        signal = rows[network, 400]["signal"]
        assert signal == network // 2 % 3
        outputs = torch.func.functional_call(module, params, (WAVES.inputs.double(),))
        errors = [(outputs - target.double()).square().mean() for target in WAVES.targets]
        assert min(range(3), key=lambda k: float(errors[k])) == signal
        assert rows[network, 400]["validation_loss"] == pytest.approx(float(errors[signal]), rel=1e-9)
        assert float(errors[signal]) < 0.02


def test_networks_that_are_signals_tell_the_class_of_theirs() -> None:
    chosen = config(SIREN, count=8, batch=None, copies=2, steps=1)
    _, rows = trained(chosen, replace(WAVES, labels=torch.tensor([7, 3, 7])))
    assert [rows[k, 1]["label"] for k in range(8)] == [7, 7, 3, 3, 7, 7, 7, 7]
    assert "label" not in trained(chosen, WAVES)[1][0, 1]


def test_stacks_are_parts_of_a_group_where_networks_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    population = config(count=16, group=8, checkpoints=Checkpoints(every=100))
    one = 8 * (2 * 9 * 8 + 4 * 51)  # Hidden values there and back, and four tensors for each parameter.

    def sizes() -> list[int]:
        return [len(block.rows) for block in train(population, data=BLOBS, dtype=torch.float64)][1::2]

    assert sizes() == [16]
    whole, _ = trained(population, BLOBS)
    monkeypatch.setattr(trainer, "CACHE_BYTES", 9 * one)
    assert sizes() == [8, 8]
    monkeypatch.setattr(trainer, "CACHE_BYTES", 3 * one)
    assert sizes() == [3, 3, 2, 3, 3, 2]
    assert_same(whole, trained(population, BLOBS)[0])
    monkeypatch.setattr(trainer, "CACHE_BYTES", one // 2)
    assert sizes() == [1] * 16


@pytest.mark.parametrize("size", [1, 3, 4, 7, 8, 100])
@pytest.mark.parametrize("ids", [range(10), range(2, 9), [0, 5, 6, 9]])
def test_stacks_hold_equally_many_of_each_group(size: int, ids: Any) -> None:
    chosen = config()
    stacks = cut(chosen, list(ids), size, is_one_group=False)
    assert list(itertools.chain(*stacks)) == list(ids)
    for stack in stacks:
        counts = [len(list(own)) for _, own in itertools.groupby(stack, key=lambda k: k // 4)]
        assert len(stack) <= size
        assert len(set(counts)) == 1
    assert [len(stack) for stack in cut(chosen, range(10), 3, is_one_group=True)] == [3, 3, 3, 1]


def test_without_a_compiler_the_program_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    chosen, data = CASES["mlp"]
    with caplog.at_level(logging.WARNING):
        networks, _ = trained(chosen, data, backend="compiled")
    assert "no C++ compiler" in caplog.text
    assert_same(trained(chosen, data)[0], networks)


def test_the_compiled_program_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(count=6, group=3, discards=(Discard(6, worst=0.4),))
    # All of the compiler but its last part, the C++ compiler, which takes most of the time.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("regauge.zoo.training.trainer._has_compiler", lambda: True)
    assert_same(trained(chosen, BLOBS)[0], trained(chosen, BLOBS, backend="compiled")[0])


@pytest.mark.parametrize("name", ["digits", "breast-cancer", "sine-waves", "digits-signals"])
def test_named_examples(name: str) -> None:
    data = load_examples(name)
    assert data is load_examples(name)
    assert data.to("cpu", torch.float32).inputs is data.inputs
    assert data.is_signals == (name in ("sine-waves", "digits-signals"))
    if not data.is_signals:
        rows = torch.cat([data.inputs, data.validation_inputs]).flatten(1)
        assert len(data.validation_inputs) == len(rows) // 10
    if name == "digits-signals":
        known = digits()
        assert data.is_test is not None
        assert data.labels is not None
        for is_test, images, labels in (
            (False, known.train_images, known.train_labels),
            (True, known.test_images, known.test_labels),
        ):
            assert torch.equal(data.targets[data.is_test == is_test].reshape(-1, 8, 8), images[:, 0])
            assert torch.equal(data.labels[data.is_test == is_test], labels)
        assert data.inputs[9].tolist() == [-0.625, -0.625]
        assert data.inputs[1].tolist() == [-0.875, -0.625]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"epochs": 2.0}, "give one of them"),
        ({"steps": None}, "give one of them"),
        ({"steps": 0}, "must be positive"),
        ({"steps": None, "epochs": math.inf}, "must be positive"),
        ({"steps": None, "epochs": 1.0, "subset": Fraction(Uniform(0.1, 0.5))}, "give steps instead"),
        ({"discards": (Discard(3, worst=0.1), Discard(3, above=1.0))}, "at the same step"),
    ],
)
def test_populations_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Discard(3), "does not define which networks to discard"),
        (lambda: Discard(3, worst=1.0), "worst share is 1.0"),
        (
            lambda: next(train(config(discards=(Discard(13, above=1.0),)), data=BLOBS)),
            "never happens, .* have 12 steps",
        ),
        (lambda: Checkpoints(0), "never happens"),
        (lambda: Fraction(0.0), "share of the examples is 0.0"),
        (lambda: ClassHalves(1.5), r"must lie in \[0, 1\]"),
        (lambda: Initialization(()), "at least one"),
        (lambda: Initialization(("xavier",)), "all from"),  # type: ignore[arg-type]
        (lambda: load_examples("imagenet"), "'imagenet' is no data set for populations"),
        (lambda: Examples("x", torch.zeros(3, 1), torch.zeros(2, 1), torch.zeros(1, 1), torch.zeros(1, 1)), "3 inputs"),
        (lambda: replace(WAVES, labels=torch.zeros(4)), "only signals have labels, one for each"),
        (lambda: replace(BLOBS, labels=torch.zeros(40)), "only signals have labels, one for each"),
        (lambda: next(train(config(), data=BLOBS, ids=[10])), r"ids are \[10\], but must be different and from 0 to 9"),
        (lambda: next(train(config(), data=BLOBS, stack=0)), "the size of a stack is 0"),
        (lambda: next(train(config(subset=Fraction(Choice((0.1, 0.5)))), data=BLOBS)), "one stack cannot hold"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("how", ["module", "convolution", "memory", "another generator"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_chance_is_refused(how: str, backend: Backend) -> None:
    chosen = config(Architecture("dropping", f"{__name__}:Dropping", {"how": how}))
    with pytest.raises(ValueError, match="a Dropping uses random numbers in training"):
        next(train(chosen, data=IMAGES if how == "convolution" else BLOBS, backend=backend))


def test_modules_without_chance_are_left_as_they_are() -> None:
    module = nn.Sequential(Branchless(), nn.Dropout(0.0))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    require_trainable(module, IMAGES)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    module[1] = nn.Linear(3, 3)
    module.append(module[1])
    with pytest.raises(ValueError, match=r"\['2.bias', '2.weight'\] are tensors with two names"):
        require_trainable(module, IMAGES)


def labeled(targets: Tensor, validation: Tensor | None = None, **how: Any) -> Examples:
    """Return examples of four features with the given targets."""
    validation = targets if validation is None else validation
    kept = validation.shape[int(how.get("is_signals", False))]
    return Examples("mine", torch.zeros(6, 4), targets, torch.zeros(kept, 4), validation, **how)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: labeled(torch.zeros(6)), r"float32 of shape \(6,\), but \[n, out\] is needed; .* axis of length 1"),
        (lambda: labeled(torch.zeros(6, dtype=torch.int32)), r"are torch.int32; give classes as torch.int64"),
        (lambda: labeled(torch.zeros(6, dtype=torch.bool)), r"are torch.bool; give classes"),
        (lambda: labeled(torch.zeros(6, 3, dtype=torch.int64)), r"int64 of shape \(6, 3\), but \[n\] is needed"),
        (lambda: labeled(torch.tensor([0, 1, 2, -1, 0, 0])), "of class -1; number the classes from 0"),
        (lambda: labeled(torch.zeros(6, 3, 1), is_signals=False), r"of shape \(6, 3, 1\), but \[n, out\]"),
        (lambda: labeled(torch.zeros(2, 6), is_signals=True), r"of shape \(2, 6\), but \[signals, n, out\]"),
        (lambda: labeled(torch.zeros(2, 6, 1, dtype=torch.int64), is_signals=True), "must be floating-point values"),
        (lambda: labeled(torch.zeros(6, 3), torch.zeros(5, 2)), r"validation torch.float32 of \(5, 2\); only axis 0"),
        (lambda: labeled(torch.zeros(6, 1), torch.zeros(5, dtype=torch.int64)), "validation torch.int64"),
        (lambda: labeled(torch.zeros(2, 6, 1), torch.zeros(3, 5, 1), is_signals=True), "only axis 1 may be"),
    ],
)
def test_targets_that_no_loss_is_known_for(make: Callable[[], Examples], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (labeled(torch.tensor([0, 1, 2, 3, 0, 0])), "class 3, but the networks have 3 outputs; give them 4, or number"),
        (labeled(torch.zeros(6).long(), torch.tensor([7])), "class 7, but the networks have 3 outputs"),
        (labeled(torch.zeros(6, 1)), "have 1 values each, but the networks 3 outputs"),
        (labeled(torch.zeros(2, 6, 4), is_signals=True), "have 4 values each, but the networks 3 outputs"),
    ],
)
def test_targets_that_the_networks_do_not_fit(data: Examples, message: str, backend: Backend) -> None:
    with pytest.raises(ValueError, match=message):
        next(train(config(), data=data, backend=backend))


@pytest.mark.parametrize(("architecture", "found"), [(TWO, "a tuple"), (MAPS, r"\(2, 3, 5, 5\)")], ids=["two", "maps"])
def test_outputs_that_no_loss_is_known_for(architecture: Architecture, found: str) -> None:
    data = IMAGES if architecture is MAPS else BLOBS
    with pytest.raises(ValueError, match=rf"gives {found} for 2 examples, but \[examples, out\] is needed"):
        next(train(config(architecture), data=data))


def test_subset_types_have_the_same_epochs() -> None:
    subsets: tuple[tuple[Subset | None, int], ...] = ((None, 10), (Fraction(0.5), 5), (ClassHalves(), 5))
    for subset, steps in subsets:
        assert config(steps=None, epochs=2.0, subset=subset).total_steps(BLOBS) == steps


@pytest.mark.parametrize(
    ("architecture", "data", "steps", "backend"),
    [
        (MLP, BLOBS, 10**9, "stacked"),
        (CONV, IMAGES, 10**9, "loop"),
        (SMALL, LARGER, 10**9, "stacked"),
        (Architecture("GRU", f"{__name__}:Recurrent", {}), BLOBS, 10**9, "loop"),
        (Architecture("compared", f"{__name__}:Gated", {}), BLOBS, 10**9, "compiled"),
        (Architecture("compared", f"{__name__}:Gated", {}), BLOBS, 12, "stacked"),
    ],
    ids=["chain", "convolutions", "chain of convolutions", "recurrent", "much work", "little work"],
)
def test_the_back_end_that_is_chosen(
    architecture: Architecture, data: Examples, steps: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "_has_compiler", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    chosen = config(architecture, steps=steps)
    module = architecture.module()
    maker = trainer._Maker(chosen, module, data, None, 10)
    assert maker.backend == backend
    monkeypatch.setattr(trainer, "_has_compiler", lambda: False)
    maker = trainer._Maker(chosen, module, data, None, 10)
    assert maker.backend == ("stacked" if backend == "compiled" else backend)


def test_networks_of_one_start_begin_alike_and_end_apart() -> None:
    whole = config(initialization=replace(KINDS, is_common=True), group=1, checkpoints=Checkpoints(12))
    found = list(train(whole, data=BLOBS))
    first, last = (torch.cat([t.flatten(1) for t in block.params.values()], 1) for block in (found[0], found[-1]))
    assert [row["step"] for row in (found[0].rows[0], found[-1].rows[0])] == [0, 12]
    assert torch.equal(first, first[:1].expand_as(first))
    assert float(torch.pdist(last).min()) > 1e-3


@pytest.mark.parametrize(
    "changes", [{"group": 4}, {"group": 1, "batch": None}, {"architecture": SIREN, "batch": None, "copies": 2}]
)
def test_networks_of_one_start_that_would_be_equal_are_refused(changes: dict[str, Any]) -> None:
    alike = replace(config(initialization=Initialization(is_common=True)), **changes)
    with pytest.raises(ValueError, match="networks 0 and 1 have the same initial weights and examples"):
        next(train(alike, data=WAVES if "copies" in changes else BLOBS))


def test_networks_of_one_start_may_differ_by_their_settings_alone() -> None:
    rates = config(initialization=Initialization(is_common=True), optimizer=SGD(lr=LogUniform(1e-3, 1e-1)))
    last = torch.cat([t.flatten(1) for t in next(train(rates, data=BLOBS)).params.values()], 1)
    assert float(torch.pdist(last).min()) > 1e-5


def test_a_setting_at_its_default_is_not_told_where_older_stores_lack_it() -> None:
    assert settings_of(Initialization()) == {"kind": "Initialization", "kinds": ["factory"], "scale": 1.0}
    assert settings_of(Initialization(is_common=True))["is_common"] is True
