"""Predictors: learning, resumption, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from predicted_networks import ARCHITECTURE, CONFIG, GRID, NETWORKS, generator, sirens
from progress import Recorded
from torch import nn

import regauge as rg
from regauge import flow, learn
from regauge import weightspace as ws
from regauge.checkpoints.writing import save
from regauge.core.params import select
from regauge.learn.input_layer import InputLayer
from regauge.learn.layer_statistics import layer_statistics
from regauge.learn.random_changes import change_values, move_inputs
from regauge.learn.rendering import Rendering
from regauge.learn.targets import Target
from regauge.storage import Store
from regauge.storage.collection import Collection


@cache
def predictor() -> learn.Predictor:
    _, symmetry, networks, values = sirens()
    return learn.fit_predictor(networks, values[:, 5], symmetry, CONFIG, generator=generator())


def test_networks_with_the_same_tensors_and_other_functions_are_read_by_their_own_symmetry() -> None:
    modules = [nn.Sequential(nn.Linear(2, 5), one(), nn.Linear(5, 1)).double() for one in (nn.ReLU, nn.Tanh)]
    found = [rg.discover(module, (torch.randn(2, 2, dtype=torch.float64),)) for module in modules]
    shapes = modules[0].state_dict().items()
    chance = generator(1)
    both = [
        {name: torch.randn(40, *t.shape, generator=chance, dtype=torch.float64) for name, t in shapes} for _ in modules
    ]
    values = torch.cat([one["2.bias"][:, 0] for one in both])
    config = replace(CONFIG, epochs=1, statistics=False)
    made = learn.fit_predictor(both, values, found, config, generator=generator())
    for symmetry, params in zip(found, both, strict=True):
        moved = symmetry.act(symmetry.random(generator(2), batch=(40,)), params)
        before, after = (made.predict(Collection(one, symmetry)) for one in (params, moved))
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="choose one with"):
        made.predict(both[0])
    alone = learn.fit_predictor(both[0], values[:40], found[0], config, generator=generator())
    with pytest.raises(ValueError, match="differ not only in the numbers of units"):
        alone.predict(Collection(both[1], found[1]))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    _, symmetry, networks, values = sirens()
    made = Store.create(tmp_path / "store", ARCHITECTURE, symmetry)
    rows = [
        {
            "id": k // 2,  # two checkpoints of each run
            "step": k % 2,
            "value": float(values[k, 5]),
            "kind": "high" if values[k, 5] > 0 else "low",
            "rare": 1.0 if k == 3 else None,
            "same": 3.0,
        }
        for k in range(NETWORKS)
    ]
    made.append(networks, rows)
    return Store.open(tmp_path / "store")


def test_numbers_are_predicted_better_than_from_statistics() -> None:
    scores = predictor().about["scores"]
    assert scores["net"]["R2"] > 0.8
    assert scores["net"]["tau"] > 0.7
    assert scores["net"]["R2"] > scores["statistics of layers, boosted trees"]["R2"] + 0.2
    assert abs(scores["the same for all"]["R2"]) < 0.2
    _, symmetry, networks, values = sirens()
    tested = predictor().tested
    assert tested is not None
    again = predictor().predict(select(networks, torch.from_numpy(tested["networks"])))
    np.testing.assert_allclose(again, tested["predicted"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(values[:, 5][tested["networks"]].numpy(), tested["measured"])
    moved = symmetry.act(symmetry.random(generator(2), predictor().net.parts, (NETWORKS,)), networks)
    np.testing.assert_allclose(predictor().predict(moved), predictor().predict(networks), atol=1e-2)


def test_classes_of_a_store_are_predicted_and_split_by_run(store: Store) -> None:
    config = replace(CONFIG, epochs=10)
    made = learn.fit_predictor(store, "kind", config=config, generator=generator(), checkpoints="all")
    assert made.target.kind == "classes"
    assert made.target.classes == ("high", "low")
    scores = made.about["scores"]
    assert scores["net"]["accuracy"] > scores["statistics of layers, boosted trees"]["accuracy"]
    assert scores["net"]["accuracy"] > 0.85
    assert made.tested is not None
    np.testing.assert_array_equal(made.tested["networks"], store.split()["test"])
    assert made.about["networks"] == {name: len(part) for name, part in store.split().items()}
    assert set(made.predict(store)) == {"high", "low"}
    likely = made.probabilities(store)
    np.testing.assert_allclose(likely.sum(1).numpy(), 1, atol=1e-6)


def test_of_a_run_the_last_checkpoint_is_read_unless_all_are_asked_for(store: Store) -> None:
    """All functions that learn from stores have this default."""
    last, every = store.rows.final(), np.arange(len(store))
    assert 10 < len(last) < len(every)
    collection = Collection(store)
    assert collection.choose(None, "last").tolist() == last.tolist()
    assert collection.choose(None, "all").tolist() == every.tolist()
    assert collection.choose([0], "last").tolist() == [0]
    with pytest.raises(ValueError, match="give 'last'"):
        collection.choose(None, "final")  # type: ignore[arg-type]
    config = replace(CONFIG, epochs=1, statistics=False)
    made = learn.fit_predictor(store, "kind", config=config, generator=generator())
    assert sum(made.about["networks"].values()) == len(last)
    assert made.tested is not None
    assert set(made.tested["networks"]) <= set(last.tolist())
    parts = store.split()
    whole = learn.fit_predictor(store, "kind", config=config, generator=generator(), split=parts)
    assert sum(whole.about["networks"].values()) == len(store)
    assert sum(len(part) for part in flow.divide(store).values()) == len(last)
    assert sum(len(part) for part in flow.divide(store, checkpoints="all").values()) == len(store)
    among = store.rows.where(step=0)
    assert store.rows.final(among).tolist() == among.tolist()


def test_a_predictor_that_knows_nothing_says_so_first() -> None:
    _, symmetry, networks, _ = sirens()
    chance = torch.rand(NETWORKS, generator=generator(5))
    config = replace(CONFIG, epochs=3, statistics=False)
    made = learn.fit_predictor(networks, chance, symmetry, config, generator=generator())
    own, constant = (made.about["scores"][label]["R2"] for label in ("net", "the same for all"))
    assert made.is_informed == (own > constant)
    worse = replace(made, about={"scores": {"net": {"R2": -0.1}, "the same for all": {"R2": -0.01}}})
    assert not worse.is_informed
    assert worse.verdict.startswith("The predictor is worse than a constant answer")
    assert "R2 -0.1 against -0.01" in worse.verdict
    better = replace(made, about={"scores": {"net": {"accuracy": 0.9}, "the same for all": {"accuracy": 0.5}}})
    assert better.verdict.startswith("The predictor is better than a constant answer: accuracy 90.0% against")


def test_plain_readers_stand_beside_a_predictor_which_says_where_they_are_better() -> None:
    _, symmetry, networks, _ = sirens()
    weights = networks["layers.1.weight"].flatten(1)
    target = weights.abs().mean(1) + weights.std(1)  # which ridge regression on statistics knows
    config = replace(CONFIG, epochs=1, lr=1e-5, linear=False)  # The linear start would know it, too.
    made = learn.fit_predictor(networks, target, symmetry, config, generator=generator())
    scores = made.about["scores"]
    names = (
        "statistics of layers, boosted trees",
        "statistics of layers, ridge regression",
        "canonical parameters, ridge regression",
    )
    assert set(scores) == {"net", *names, "the same for all"}
    assert scores[names[1]]["R2"] > 0.9 > scores["net"]["R2"]
    assert made.is_best is False
    assert made.results()["is_best"] is False
    known = replace(made, about={"scores": {**scores, "net": {"R2": 0.5}}})
    assert "But a simple baseline is even better (statistics of layers, " in known.verdict
    assert "More networks, a longer training, or probes help" in known.verdict
    best = replace(made, about={"scores": {**scores, "net": {"R2": 1.0}}})
    assert best.is_best
    assert "plain reader" not in best.verdict
    assert predictor().is_best  # Probes of a function are in no statistics.
    moved = symmetry.act(symmetry.random(generator(3), batch=(NETWORKS,)), networks)
    again = learn.fit_predictor(moved, target, symmetry, config, generator=generator()).about["scores"]
    assert again[names[2]]["R2"] == pytest.approx(scores[names[2]]["R2"], abs=1e-3)  # Canonical forms know no orbit.


def test_the_seed_that_is_told_can_be_given_back() -> None:
    assert predictor().about["seed"] == generator().initial_seed()


def test_test_networks_are_those_of_the_column(tmp_path: Path) -> None:
    _, symmetry, networks, values = sirens()
    made = Store.create(tmp_path / "store", ARCHITECTURE, symmetry)
    rows = [
        {"id": k, "step": 0, "value": float(values[k, 5]), "split": "test" if k % 7 == 0 else "train"}
        for k in range(NETWORKS)
    ]
    made.append(networks, rows)
    done = learn.fit_predictor(
        Store.open(tmp_path / "store"),
        "value",
        config=replace(CONFIG, epochs=1, statistics=False, widening=True),
        generator=generator(),
    )
    assert {*done.net.settings.readers} == ws.find_readers(symmetry) != set()
    assert done.tested is not None
    np.testing.assert_array_equal(done.tested["networks"], np.arange(0, NETWORKS, 7))
    assert sum(done.about["networks"].values()) == NETWORKS


def test_fractions_are_predicted_within_their_bounds() -> None:
    _, symmetry, networks, values = sirens()
    shares = (2 * values[:, 5]).sigmoid()
    config = replace(CONFIG, kind="fractions", values=ws.Logarithms(), reads_moments=True)
    made = learn.fit_predictor(networks, shares, symmetry, config, generator=generator())
    assert made.about["scores"]["net"]["R2"] > 0.8
    far = made.predict({name: 5 * tensor for name, tensor in networks.items()})
    assert 0 <= far.min() < far.max() <= 1
    assert abs(made.target.mean - float(shares.mean())) < 0.05
    assert made.about["scores"]["the same for all"]["absolute error"] < 0.5
    with pytest.raises(ValueError, match=r"but fractions lie in \[0, 1\]; predict numbers"):
        learn.fit_predictor(networks, 2 * shares, symmetry, config, generator=generator())
    with pytest.raises(ValueError, match="is a number, not a class"):
        made.probabilities(networks)


def test_a_budget_of_cpu_time_is_not_spent_by_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    _, symmetry, networks, values = sirens()
    now = iter(range(0, 10_000_000, 1000))
    monkeypatch.setattr("regauge.training.descent.time.monotonic", lambda: float(next(now)))
    config = replace(CONFIG, epochs=2, seconds=500.0, is_cpu_time=True, statistics=False)
    made = learn.fit_predictor(networks, values[:, 5], symmetry, config, generator=generator())
    assert made.trained is not None
    assert made.trained.ended == "epochs"
    made = learn.fit_predictor(
        networks, values[:, 5], symmetry, replace(config, is_cpu_time=False), generator=generator()
    )
    assert made.trained is not None
    assert made.trained.ended == "seconds"


class Killed(Exception):
    pass


def kill_after(steps: int) -> Any:
    """Return a progress display that simulates the end of the process after some steps."""

    def begin(label: str, total: float, /) -> Any:
        done = 0

        def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
            nonlocal done
            done += 1
            if label == "training" and done == steps:
                raise Killed

        return advance

    return begin


@pytest.mark.parametrize("steps", [7])
def test_a_training_that_was_killed_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    module, symmetry, networks, values = sirens()
    networks, values = select(networks, slice(200)), values[:200]  # five steps in each epoch
    config = replace(
        CONFIG,
        epochs=3,
        dropout=0.3,
        augment=("permutation", "sign"),
        changes=(learn.Noise(0.02), learn.Translation(0.1)),
        render=0.5,
        probes=2,
        statistics=False,
    )

    def fit(**options: Any) -> learn.Predictor:
        return learn.fit_predictor(
            networks, values[:, 5], symmetry, config, generator=generator(), module=module, inputs=GRID, **options
        )

    monkeypatch.setattr("regauge.checkpoints.state_file.SECONDS", 0.0)
    whole, state = fit(), tmp_path / "state.safetensors"
    with pytest.raises(Killed):
        fit(state=state, progress=kill_after(steps))
    assert state.exists()
    resumed = fit(state=state)
    for name, tensor in whole.net.state_dict().items():
        assert torch.equal(tensor, resumed.net.state_dict()[name]), name
    assert whole.trained is not None
    assert resumed.trained is not None
    for one, other in zip(whole.trained.history, resumed.trained.history, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    with pytest.raises(ValueError, match=r"other settings or networks \(settings\)"):
        learn.fit_predictor(
            networks, values[:, 5], symmetry, replace(config, lr=1e-4), generator=generator(), module=module,
            inputs=GRID, state=state,
        )  # fmt: skip


def test_weights_beside_probes_are_never_worse_in_validation_than_the_probes() -> None:
    module, symmetry, networks, values = sirens()
    config = replace(CONFIG, epochs=3, probes=9, statistics=False)
    made = learn.fit_predictor(
        networks, values[:, 5], symmetry, config, generator=generator(), module=module, inputs=GRID
    )
    assert made.trained is not None
    losses = [row["validation_loss"] for row in made.trained.history]
    assert [row["epoch"] for row in made.trained.history] == list(range(6))
    assert losses[made.trained.best] == min(losses)
    assert made.trained.best >= 3
    both = made.predict(networks)
    made.net.share.fill_(1.0)
    alone = made.predict(networks)
    assert not np.array_equal(alone, both) or min(losses[:3]) == min(losses)


def test_probes_alone_are_what_is_read_unless_layers_are_wanted() -> None:
    module, symmetry, networks, values = sirens()
    config = learn.PredictorConfig(epochs=12, batch=32, probes=(3, 4), statistics=False)
    made = learn.fit_predictor(
        networks, values[:, 5], symmetry, config, generator=generator(), module=module, inputs=GRID
    )
    assert not len(made.net.layers)
    assert made.about["scores"]["net"]["R2"] > 0.8
    with pytest.raises(ValueError, match="give `probes`, or a positive depth"):
        learn.PredictorConfig(depth=0)


def test_best_weights_are_kept_and_copied() -> None:
    _, symmetry, networks, values = sirens()
    config = replace(CONFIG, epochs=6, lr=0.3, clip=100.0, patience=2, statistics=False)
    made = learn.fit_predictor(networks, values[:, 5], symmetry, config, generator=generator())
    assert made.trained is not None
    losses = [row["validation_loss"] for row in made.trained.history]
    assert made.trained.best == int(np.argmin(losses))
    assert len(losses) == 6 or (made.trained.ended == "patience" and len(losses) == made.trained.best + 3)
    parts = learn.populations.split_networks(Collection(networks), np.arange(NETWORKS), None)["validation"]
    predicted = made.predict(select(networks, torch.from_numpy(parts)))
    encoded = made.target.encode(values[:, 5].numpy()[parts])
    outputs = (torch.from_numpy(predicted) - made.target.mean) / made.target.deviation
    assert float(made.target.loss(outputs[:, None], encoded)) == pytest.approx(min(losses), rel=1e-4)


def test_seconds_end_a_training_and_its_progress_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, symmetry, networks, values = sirens()
    now, shown = iter(range(10_000)), Recorded()
    monkeypatch.setattr("regauge.training.descent.time.monotonic", lambda: float(next(now)))
    config = replace(CONFIG, epochs=100_000, seconds=50.0, statistics=False)
    made = learn.fit_predictor(networks, values[:, 5], symmetry, config, generator=generator(), progress=shown)
    assert made.trained is not None
    assert made.trained.ended == "seconds"
    assert made.trained.history[-1]["lr"] < config.lr  # the schedule ends with them
    assert shown.labels[0] == "training, seconds"
    total, *_ = shown.totals
    assert total == 50
    assert sum(shown.amounts) == pytest.approx(total)
    assert 0 < max(shown.amounts) < 0.2 * total


def test_a_training_that_ends_early_shows_no_end() -> None:
    _, symmetry, networks, values = sirens()
    by_epochs, by_patience = Recorded(), Recorded()
    config = replace(CONFIG, epochs=2, seconds=1000.0, statistics=False)
    learn.fit_predictor(networks, values[:, 5], symmetry, config, generator=generator(), progress=by_epochs)
    assert by_epochs.totals == [1000]
    assert 0 < sum(by_epochs.amounts) < 500
    config = replace(CONFIG, epochs=500, patience=1, lr=10.0, statistics=False)
    made = learn.fit_predictor(networks, values[:, 5], symmetry, config, generator=generator(), progress=by_patience)
    assert made.trained is not None
    assert made.trained.ended == "patience"
    assert sum(by_patience.amounts) == made.trained.history[-1]["step"] < by_patience.totals[0]


def test_a_predictor_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    _, _, networks, _ = sirens()
    path = predictor().save(tmp_path / "p.safetensors")
    again = learn.load_predictor(path)
    np.testing.assert_array_equal(again.predict(networks), predictor().predict(networks))
    assert again.about["scores"] == predictor().about["scores"]
    assert again.target == predictor().target


def test_changes_of_inputs_are_changes_of_weights() -> None:
    module, symmetry, networks, _ = sirens()
    layer = InputLayer.find(symmetry, module)
    assert layer == InputLayer("layers.0.weight", "layers.0.bias", 2)
    some = select(networks, slice(4))
    run = torch.func.vmap(lambda one, x: torch.func.functional_call(module, one, (x,)))
    for change in (learn.Translation(0.3), learn.Rotation(90), learn.Scaling(0.4)):
        moved = move_inputs(some, (change,), layer, generator(3))
        matrix, shift = change.draw(4, 2, generator(3))
        points = GRID @ matrix.mT + shift.unsqueeze(1)
        torch.testing.assert_close(run(moved, GRID.expand(4, -1, -1)), run(some, points), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(points, GRID.expand(4, -1, -1))


@pytest.mark.parametrize("inputs", [2, 3, 5])
def test_rotations_are_rotations(inputs: int) -> None:
    matrix, _ = learn.Rotation(120).draw(10, inputs, generator())
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(inputs).expand(10, -1, -1), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.det(matrix), torch.ones(10))
    angles = ((matrix.diagonal(dim1=1, dim2=2).sum(1) - inputs + 2) / 2).clamp(-1, 1).acos().rad2deg()
    assert float(angles.max()) <= 120.1
    assert float(angles.std()) > 10


def test_noise_keeps_variances_and_ties() -> None:
    networks = {"var": torch.full((2, 50), 0.1), "a": torch.randn(2, 50, generator=generator()), "steps": torch.ones(2)}
    networks["b"], networks["steps"] = networks["a"], networks["steps"].long()
    made = change_values(networks, (learn.Noise(3.0), learn.Dropout(0.5)), (("a", "b"),), generator())
    assert bool((made["var"] >= 0).all())
    assert torch.equal(made["a"], made["b"])
    assert torch.equal(made["steps"], networks["steps"])
    assert 0.3 < float((made["a"] == 0).float().mean()) < 0.7


def test_renderings_are_what_the_networks_compute() -> None:
    module, symmetry, networks, values = sirens()
    rendering = Rendering(module, GRID).standardize(networks)
    made = rendering(networks)
    torch.testing.assert_close(made * rendering.deviation + rendering.mean, values)
    assert float(made.square().mean()) == pytest.approx(1, abs=1e-3)
    moved = symmetry.act(symmetry.random(generator(), None, (NETWORKS,)), networks)
    torch.testing.assert_close(rendering(moved), made, rtol=1e-3, atol=1e-3)


def test_what_networks_compute_is_learned_beside_the_target() -> None:
    module, symmetry, networks, values = sirens()
    config = replace(CONFIG, render=1.0, statistics=False)
    made = learn.fit_predictor(
        networks, values[:, 5], symmetry, config, generator=generator(), module=module, inputs=GRID
    )
    assert made.about["scores"]["net"]["R2"] > 0.7
    assert made.tested is not None
    held_out = select(networks, torch.from_numpy(made.tested["networks"]))
    wanted = Rendering(module, GRID).standardize(networks)(held_out)
    with torch.no_grad():
        read = made.net(held_out)[:, 1:]
    assert float((read - wanted).square().mean()) < 0.5 * float(wanted.square().mean())


def test_statistics_do_not_change_under_permutations() -> None:
    _, symmetry, networks, _ = sirens()
    moved = symmetry.act(symmetry.random(generator(), ("permutation",), (NETWORKS,)), networks)
    np.testing.assert_allclose(layer_statistics(moved), layer_statistics(networks), rtol=1e-5, atol=1e-6)
    assert layer_statistics(networks).shape == (NETWORKS, 7 * len(networks))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array(["a", "b"] * 9, object), "classes"),
        (np.array([True, False] * 9), "classes"),
        (np.array([0, 1, 2] * 9), "classes"),
        (np.arange(27), "numbers"),
        (np.array([0.1, 0.2] * 9), "numbers"),
    ],
)
def test_kinds_are_found_and_decoded(values: Any, kind: str) -> None:
    target = Target.of("t", values, values)
    assert target.kind == kind
    encoded = target.encode(values)
    outputs = nn.functional.one_hot(encoded, len(target.classes)) if kind == "classes" else encoded[:, None]
    decoded = target.decode(outputs)
    assert list(decoded) == list(values) if kind == "classes" else np.allclose(decoded, values.astype(float), atol=1e-4)
    best = target.score(decoded, values)
    assert best.get("accuracy", best.get("R2")) == pytest.approx(1)
    assert Target.from_json(target.to_json()) == target


REFUSED: dict[str, tuple[Callable[[Store], Any], str]] = {
    "no such column": (lambda store: fit(store, "other"), "no column 'other'"),
    "constant": (lambda store: fit(store, "same"), "nothing to predict"),
    "one value": (lambda store: fit(store, "rare"), "none is left"),
    "texts as numbers": (lambda store: fit(store, "kind", kind="numbers"), "are not numbers"),
    "shape": (lambda store: fit(store, torch.zeros(3)), "one for each"),
    "no inputs": (lambda store: fit(store, "value", render=1.0), "give `inputs`"),
    "a column of a population": (lambda _: fit(sirens()[2], "value"), "a population in memory has no columns"),
    "no symmetry": (lambda _: fit(sirens()[2], sirens()[3][:, 0]), "give `symmetry`"),
    "rotations of numbers": (lambda _: learn.Rotation(10).draw(2, 1, generator()), "no rotations"),
    "no translation": (lambda _: learn.Translation(0), "must be positive"),
    "copies under maxima": (lambda _: learn.PredictorConfig(layer=ws.DWS(), widening=True), "choose means"),
    "no epochs": (lambda _: learn.PredictorConfig(epochs=0), "are invalid"),
    "split": (
        lambda store: learn.fit_predictor(store, "value", generator=generator(), split={"train": [1], "test": [2]}),
        "lacks",
    ),
    "overlap": (
        lambda store: learn.fit_predictor(
            store, "value", generator=generator(), split={"train": [1, 2], "test": [2], "validation": [3]}
        ),
        "distinct",
    ),
    "another architecture": (lambda _: predictor().predict({"w": torch.zeros(2, 3)}), "the networks lack"),
    "not finite": (
        lambda _: predictor().predict({name: t.clone().fill_(torch.nan) for name, t in sirens()[2].items()}),
        "NaN or Inf",
    ),
    "probabilities of numbers": (lambda _: predictor().probabilities(sirens()[2]), "is a number"),
}


def fit(networks: Any, targets: Any, **options: Any) -> learn.Predictor:
    return learn.fit_predictor(networks, targets, config=replace(CONFIG, epochs=1, **options), generator=generator())


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_gets_a_sentence(store: Store, case: str) -> None:
    attempt, words = REFUSED[case]
    with pytest.raises((ValueError, KeyError), match=words):
        attempt(store)


def test_motions_of_inputs_need_a_layer_of_inputs() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    symmetry = rg.discover(module, (torch.randn(2, 1, 4, 4),))
    with pytest.raises(ValueError, match="leave out translations"):
        InputLayer.find(symmetry, module)


def test_other_files_are_no_predictors_and_no_states(tmp_path: Path) -> None:
    _, symmetry, networks, values = sirens()
    net = ws.Metanet(symmetry, head=ws.Invariant(2), width=8, depth=1, generator=generator())
    with pytest.raises(ValueError, match="not a predictor"):
        learn.load_predictor(net.save(tmp_path / "net.safetensors"))
    state = save({"a": torch.zeros(2)}, tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="not the state of a training"):
        learn.fit_predictor(networks, values[:, 5], symmetry, CONFIG, generator=generator(), state=state)


def test_copies_of_one_signal_are_in_one_part(tmp_path: Path) -> None:
    _, symmetry, networks, values = sirens()

    def split(name: str, rows: list[dict[str, Any]], by: str | None = None) -> dict[str, np.ndarray]:
        made = Store.create(tmp_path / name, ARCHITECTURE, symmetry)
        made.append(networks, rows)
        return learn.populations.split_networks(Collection(Store.open(tmp_path / name)), np.arange(NETWORKS), None, by)

    rows = [{"id": k, "step": 0, "signal": k // 5, "source": f"image {k // 5}"} for k in range(NETWORKS)]
    for parts in (split("signals", rows), split("sources", [{**row, "signal": 0} for row in rows], "source")):
        found = [set((part // 5).tolist()) for part in parts.values()]
        assert sum(map(len, parts.values())) == NETWORKS
        assert sum(map(len, found)) == len(set().union(*found))
        assert all(found)
    torn = [{**row, "split": "test" if k % 2 else "train"} for k, row in enumerate(rows)]
    with pytest.raises(ValueError, match="values of 'signal' have networks for train and for test"):
        split("torn", torn)
    assert len(values) == NETWORKS


@pytest.mark.parametrize(
    ("fit", "config"),
    [
        (learn.fit_predictor, learn.PredictorConfig),
        (learn.fit_matching, learn.MatchingConfig),
        (learn.fit_autoencoder, learn.AutoencoderConfig),
        (flow.fit, flow.FlowConfig),
    ],
)
def test_seconds_are_those_of_the_clock_in_all_four_and_all_four_say_so(fit: Any, config: Any) -> None:
    assert config().is_cpu_time is False
    assert "by the clock unless `is_cpu_time`" in str(fit.__doc__)
