"""Public zoos in their own layouts are read into stores, evaluated, and written again."""

import csv
import gzip
import importlib
import itertools
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from progress import Recorded
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import EXPORTERS, FORMATS, Source, import_zoo
from regauge.zoo.formats import zoo_source as source_module
from regauge.zoo.formats.folder import read_deep_align, read_dwsnets, read_folder
from regauge.zoo.formats.matrix_zoos import read_hdf5, read_small_cnn_zoo
from regauge.zoo.formats.ray_tune import read_ray_tune, read_vit_model_zoo
from regauge.zoo.formats.small_transformers import read_small_transformer_zoo

GENERATOR = torch.Generator().manual_seed(0)


def perturb(module: nn.Module) -> Params:
    return {name: t + 0.1 * torch.randn(t.shape, generator=GENERATOR) for name, t in module.state_dict().items()}


def sine_chain(params: Params, x: Tensor) -> Tensor:
    """Return the outputs of DWSNets' networks, computed from their files."""
    for k in (0, 1):
        x = torch.sin(30 * (x @ params[f"seq.{k}.weight"].T + params[f"seq.{k}.bias"]))
    return x @ params["seq.2.weight"].T + params["seq.2.bias"] + 0.5


def network(store: Store, index: int) -> Params:
    return {name: tensor[0] for name, tensor in store.read([index]).items()}


def output(store: Store, index: int, x: Tensor) -> Tensor:
    module = store.architecture.module().eval()
    result: Tensor = functional_call(module, network(store, index), (x,))
    return result


def moved(store: Store, x: Tensor) -> None:
    """Assert that the symmetry that was found at import preserves the function of the imported networks."""
    assert store.symmetry is not None
    assert store.symmetry.groups
    for k in range(len(store)):
        params = {name: tensor.double() for name, tensor in network(store, k).items()}
        element = store.symmetry.random(torch.Generator().manual_seed(k))
        module = store.architecture.module().eval().double()
        after = functional_call(module, store.symmetry.act(element, params), (x.double(),))
        torch.testing.assert_close(after, functional_call(module, params, (x.double(),)), rtol=1e-8, atol=1e-8)
        assert not torch.equal(next(iter(store.symmetry.act(element, params).values())), next(iter(params.values())))


def dwsnets(folder: Path, count: int = 3) -> dict[str, Params]:
    made = {}
    for k, (split, label) in zip(range(count), itertools.cycle([("training", 3), ("testing", 0), ("training", 7)])):
        sizes = [(2, 8), (8, 8), (8, 1)]
        params = {}
        for i, (before, after) in enumerate(sizes):
            params[f"seq.{i}.weight"] = torch.randn(after, before, generator=GENERATOR) / 10
            params[f"seq.{i}.bias"] = torch.randn(after, generator=GENERATOR) / 10
        place = folder / "mnist-inrs" / f"mnist_png_{split}_{label}_{k}" / "checkpoints"
        place.mkdir(parents=True)
        torch.save(params, place / "model_final.pth")
        made[f"mnist-inrs/mnist_png_{split}_{label}_{k}/checkpoints/model_final.pth"] = params
    (folder / "mnist-inrs" / "mnist_splits.json").write_text("{}")
    return made


def test_sine_networks_in_folders(tmp_path: Path) -> None:
    made = dwsnets(tmp_path / "raw")
    store = import_zoo(read_dwsnets(tmp_path / "raw"), tmp_path / "zoo")
    x = torch.rand(5, 2, generator=GENERATOR) * 2 - 1
    assert len(store) == 3
    for k, row in enumerate(store.rows.dicts()):
        torch.testing.assert_close(output(store, k, x), sine_chain(made[row["file"]], x))
        assert row["file"].split("_")[2:4] == [row["split"], str(row["label"])]
    moved(store, x)
    assert {group.kind for group in store.symmetry.groups} == {"dihedral"}  # type: ignore[union-attr]
    EXPORTERS["dwsnets"](store, tmp_path / "out", range(len(store)))
    again = import_zoo(read_dwsnets(tmp_path / "out"), tmp_path / "again")
    assert sorted(again.rows["label"].tolist()) == [0, 3, 7]
    by_label = {row["label"]: k for k, row in enumerate(store.rows.dicts())}
    for k, row in enumerate(again.rows.dicts()):
        assert torch.equal(output(again, k, x), output(store, by_label[row["label"]], x))
    splits = json.loads((tmp_path / "out" / "splits.json").read_text())
    assert splits["testing"]["label"] == [0]
    assert (tmp_path / "out" / splits["training"]["path"][1]).is_file()


def write_nfn(folder: Path, numbers: Sequence[int], outputs: int = 1) -> dict[str, Params]:
    """Write files in the layout of NFN's sine networks."""
    made = {}
    for k in numbers:
        params = {}
        for i, (before, after) in enumerate([(2, 6), (6, 6), (6, outputs)]):
            name = f"net.{i}." + ("linear." if i < 2 else "")
            params[f"{name}weight"] = torch.randn(after, before, generator=GENERATOR) / 10
            params[f"{name}bias"] = torch.randn(after, generator=GENERATOR) / 10
        place = folder / f"randinit_smaller_{k % 10}s" / f"net{k}.pth"
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(params, place)
        made[place.relative_to(folder).as_posix()] = params
    return made


def test_sine_networks_whose_numbers_give_the_split(tmp_path: Path) -> None:
    made = write_nfn(tmp_path / "raw", (3, 44_999, 45_000, 49_999, 50_000, 60_001))
    (tmp_path / "raw" / "randinit_test_3s").mkdir()  # Another population of the same download.
    torch.save({}, tmp_path / "raw" / "randinit_test_3s" / "net3.pth")
    store = import_zoo(FORMATS["nfn"](tmp_path / "raw"), tmp_path / "zoo")
    x = torch.rand(5, 2, generator=GENERATOR) * 2 - 1
    assert len(store) == len(made)
    wanted = {3: "train", 44_999: "train", 45_000: "validation", 49_999: "validation", 50_000: "test", 60_001: "test"}
    for k, row in enumerate(store.rows.dicts()):
        chain = {f"seq.{n.split('.')[1]}.{n.split('.')[-1]}": t for n, t in made[row["file"]].items()}
        torch.testing.assert_close(output(store, k, x), sine_chain(chain, x) - 0.5)  # Nothing is added here.
        assert (row["split"], row["label"]) == (wanted[row["number"]], row["number"] % 10)
    moved(store, x)
    with pytest.raises(FileNotFoundError, match="NFN's folders"):
        FORMATS["nfn"](tmp_path / "zoo")
    for name in made:
        torch.save({"net.0.linear.weight": torch.zeros(6, 2)}, tmp_path / "raw" / name)
    with pytest.raises(ValueError, match="a chain has"):
        FORMATS["nfn"](tmp_path / "raw")


@pytest.mark.parametrize("name", ["nfn", "dwsnets", "small-cnn-zoo", "small-transformer-zoo", "vit-model-zoo"])
def test_a_downloaded_zoo_becomes_a_table_in_one_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published split is used if the download has one, and the first line names the authors of the networks."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    study, raw = importlib.import_module("published_zoos"), tmp_path / "raw"
    kind = {
        "kind": study.ZOOS[name].settings.get("kind", "numbers")
    }  # The nets of the zoos are too large for this test.
    monkeypatch.setattr(study, "ZOOS", {key: replace(zoo, settings=kind) for key, zoo in study.ZOOS.items()})
    if name == "nfn":
        write_nfn(raw, [*range(12), 45_000, 45_001, 50_000, 50_001, 50_002])
        counts = "17 in raw (12 for train, 2 for validation, 3 for test)"
    elif name == "dwsnets":
        dwsnets(raw, 9)
        counts = "9 in raw (5 for train, 1 for validation, 3 for test)"
    elif name == "small-cnn-zoo":
        write_small_cnn_zoo(raw, runs=12)
        counts = "36 in raw"
    elif name == "small-transformer-zoo":
        write_small_transformers(raw, 21)
        counts = "20 in raw (14 for train, 3 for validation, 3 for test)"
    else:
        write_vit_model_zoo(raw, 3, 4)
        counts = "24 in raw (each pretrained network for test once)"
    chosen = ["--template", "**FCMLP_False**"] if name == "vit-model-zoo" else []
    monkeypatch.setattr("sys.argv", ["published_zoos.py", name, str(raw), "--seconds", "0.2", *chosen])
    study.main()
    head, _, header, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(f"Networks of {study.ZOOS[name].whose}: {counts}")
    assert study.ZOOS[name].split in head
    assert header.startswith("|  | accuracy" if name in ("nfn", "dwsnets") else "|  | R2")
    assert len(rows) > 2


CHAINS = [
    ("regauge.nets.siren:Siren", {"in_features": 2, "width": 6, "out_features": 1, "depth": 3}),
    ("regauge.nets.siren:Siren", {"in_features": 2, "width": 6, "omega": 30.0}),
    ("regauge.zoo.formats.modules:ImageSiren", {"in_features": 2, "width": 6, "out_features": 3}),
    ("regauge.nets.mlp:mlp", {"widths": [2, 6, 5, 1]}),
    ("regauge.zoo.formats.modules:Listed", {"layers": [["linear", 2, 6], ["relu"], ["linear", 6, 3]]}),
]


def chains(folder: Path, factory: str, settings: dict[str, Any]) -> Store:
    """Return networks of a chain, with labels."""
    architecture = Architecture("chain", factory, settings)
    store = Store.create(folder, architecture)
    parts = [perturb(architecture.module()) for _ in range(3)]
    params = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    store.append(params, [{"id": k, "step": 0, "label": k} for k in range(3)])
    return store


@pytest.mark.parametrize(("factory", "settings"), CHAINS)
def test_a_chain_is_read_again_as_the_same_function(tmp_path: Path, factory: str, settings: dict[str, Any]) -> None:
    store = chains(tmp_path / "zoo", factory, settings)
    EXPORTERS["dwsnets"](store, tmp_path / "out", range(3))
    again = import_zoo(read_dwsnets(tmp_path / "out"), tmp_path / "again")
    x = torch.rand(5, 2, generator=GENERATOR) * 2 - 1
    assert sorted(again.rows["label"].tolist()) == [0, 1, 2]
    for k, row in enumerate(again.rows.dicts()):
        torch.testing.assert_close(output(again, k, x), output(store, row["label"], x))


@pytest.mark.parametrize(
    ("factory", "settings", "match"),
    [
        ("regauge.nets.siren:Siren", {"omega": 10.0}, r"has sin\(10 h\) between its layers, but .* sin\(30 h\)"),
        ("regauge.zoo.formats.modules:ImageSiren", {"omega": 31}, r"has sin\(31 h\) between"),
        ("regauge.nets.mlp:mlp", {"widths": [2, 3, 1], "activation": {"import": "torch:tanh"}}, r"has tanh\(1 h\)"),
        ("regauge.nets.mlp:mlp", {"widths": [2, 1]}, "has nothing between its layers"),
        ("regauge.zoo.formats.modules:SmallCNN", {}, "is not a chain of linear layers"),
    ],
)
def test_chains_that_would_be_read_as_others(
    tmp_path: Path, factory: str, settings: dict[str, Any], match: str
) -> None:
    store = chains(tmp_path / "zoo", factory, settings)
    with pytest.raises(ValueError, match=match):
        EXPORTERS["dwsnets"](store, tmp_path / "out", range(3))
    assert not (tmp_path / "out").exists()


def test_networks_without_labels_have_no_folders(tmp_path: Path) -> None:
    store = chains(tmp_path / "zoo", *CHAINS[0])
    store.append(store.read([0]), [{"id": 3, "step": 0}])
    store.refresh()
    with pytest.raises(ValueError, match="no value in a column 'label'"):
        EXPORTERS["dwsnets"](store, tmp_path / "out", range(4))
    EXPORTERS["dwsnets"](store, tmp_path / "out", range(3))


def test_classifiers_in_a_zip_file(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    made = []
    with zipfile.ZipFile(tmp_path / "mlps.zip", "w") as archive:
        for k in range(4):
            params = perturb(module)
            made.append(params)
            state = {f"seq.{name}": tensor for name, tensor in params.items()}
            torch.save(state | {"label": torch.tensor(k % 2) if k else 0}, tmp_path / "one.pth")
            archive.write(tmp_path / "one.pth", f"mlps/{k}/model.pth")
    store = import_zoo(read_deep_align(tmp_path / "mlps.zip"), tmp_path / "zoo")
    x = torch.randn(5, 6, generator=GENERATOR)
    assert store.rows["label"].tolist() == [0, 1, 0, 1]
    for k, params in enumerate(made):
        torch.testing.assert_close(output(store, k, x), functional_call(module, params, (x,)))
    moved(store, x)


def write_small_cnn_zoo(folder: Path, activations: tuple[str, ...] = ("relu",), runs: int = 2) -> np.ndarray[Any, Any]:
    """Write trajectories of three checkpoints. Every value is its index in the file, so that a transposition is
    visible.
    """
    layout = [
        ("sequential/conv2d/bias:0", (4,)),
        ("sequential/conv2d/kernel:0", (3, 3, 1, 4)),
        ("sequential/conv2d_1/bias:0", (5,)),
        ("sequential/conv2d_1/kernel:0", (3, 3, 4, 5)),
        ("sequential/dense/bias:0", (10,)),
        ("sequential/dense/kernel:0", (5, 10)),
    ]
    folder.mkdir()
    start = 0
    with open(folder / "layout.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["varname", "shape", "start_idx", "end_idx"])
        for name, shape in layout:
            writer.writerow([name, str(shape), start, start + int(np.prod(shape))])
            start += int(np.prod(shape))
    weights = np.random.default_rng(0).normal(size=(3 * runs, start)).astype(np.float32)
    weights[4, 7] = np.nan
    np.save(folder / "weights.npy", weights)
    with gzip.open(folder / "metrics.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["", "config.activation", "config.learning_rate", "modeldir", "step", "test_accuracy", "laststep"]
        )
        for k in range(3 * runs):
            activation = activations[k // 3 % len(activations)]
            row = [k, activation, 0.003, f"/dir/{k // 3}", (0, 60, 86)[k % 3], 0.1 * (k % 10), k % 3 == 2]
            writer.writerow(row)
    return weights


def test_the_small_cnn_zoo(tmp_path: Path) -> None:
    weights = write_small_cnn_zoo(tmp_path / "raw")
    store = import_zoo(read_small_cnn_zoo(tmp_path / "raw"), tmp_path / "zoo")
    assert store.rows["id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert store.rows["step"].tolist() == [0, 60, 86, 0, 60, 86]
    assert store.rows.where(is_finite=False).tolist() == [4]
    assert store.rows.final().tolist() == [2, 5] == store.rows.where(laststep=True).tolist()
    assert store.rows.dicts([5])[0]["config.learning_rate"] == 0.003
    # A convolution in TensorFlow's order, by its definition.
    kernel = torch.from_numpy(weights[2, 4:40].reshape(3, 3, 1, 4))
    image = torch.randn(1, 1, 7, 7, generator=GENERATOR)
    module = store.architecture.module()
    params = network(store, 2)
    found = functional_call(
        module.convolutions[0], {k: params[f"convolutions.0.{k}"] for k in ("weight", "bias")}, image
    )  # type: ignore[index]
    for channel in range(4):
        patch = image[0, 0, 2:5, 4:7]
        expected = (patch * kernel[:, :, 0, channel]).sum() + weights[2, channel]
        torch.testing.assert_close(found[0, channel, 1, 2], expected)
    dense = torch.from_numpy(weights[2, -50:].reshape(5, 10))
    assert torch.equal(params["output.weight"], dense.T)
    assert len(import_zoo(read_small_cnn_zoo(tmp_path / "raw"), tmp_path / "zoo")) == 6


def test_the_small_cnn_zoo_is_written_as_it_is_read(tmp_path: Path) -> None:
    weights = write_small_cnn_zoo(tmp_path / "raw", ("relu", "tanh"))
    with pytest.raises(ValueError, match=r"activations \['relu', 'tanh'\]; choose one"):
        read_small_cnn_zoo(tmp_path / "raw")
    store = import_zoo(read_small_cnn_zoo(tmp_path / "raw", activation="relu"), tmp_path / "zoo")
    moved(store, torch.randn(2, 1, 32, 32, generator=GENERATOR))
    EXPORTERS["small-cnn-zoo"](store, tmp_path / "out", range(3))
    again = import_zoo(read_small_cnn_zoo(tmp_path / "out"), tmp_path / "again")
    for name, tensor in store.read(range(3)).items():
        assert torch.equal(again.read(range(3))[name], tensor)
    exported = np.load(tmp_path / "out" / "weights.npy")
    assert sorted(exported[1].tolist()) == sorted(weights[1].tolist())
    assert again.rows["test_accuracy"].tolist() == store.rows["test_accuracy"].tolist()
    assert again.architecture == store.architecture
    np.save(tmp_path / "raw" / "weights.npy", weights[:, :-1])
    with pytest.raises(ValueError, match="different zoos"):
        read_small_cnn_zoo(tmp_path / "raw", activation="tanh")
    metrics = (tmp_path / "raw" / "metrics.csv.gz").read_bytes()
    for damaged in (metrics[:-20], metrics[:60] + b"\xff" * 20 + metrics[80:], b"no gzip"):
        (tmp_path / "raw" / "metrics.csv.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"metrics.csv.gz' is damaged .*fetch it again"):
            read_small_cnn_zoo(tmp_path / "raw")
    (tmp_path / "raw" / "metrics.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no metrics.csv.gz"):
        read_small_cnn_zoo(tmp_path / "raw")


def ray_tune(folder: Path, settings: dict[str, Any], module: nn.ModuleList, shape: tuple[int, ...]) -> list[Params]:
    made = []
    for trial in range(2):
        place = folder / "experiment" / f"NN_tune_trainable_{trial}_seed={trial}"
        place.mkdir(parents=True)
        (place / "params.json").write_text(json.dumps(settings | {"seed": trial, "optim::lr": 0.1}))
        lines = []
        for epoch in (1, 2):
            params = {f"module_list.{name}": tensor for name, tensor in perturb(module).items()}
            made.append(params)
            checkpoint = place / (f"checkpoint_{epoch:06d}" if trial else f"checkpoint_{epoch}")
            checkpoint.mkdir()
            torch.save(params, checkpoint / "checkpoints")
            lines.append(json.dumps({"training_iteration": epoch, "test_acc": epoch / 10, "config": settings}))
        (place / "result.json").write_text("\n".join([*lines, '{"training_iter']))
    return made


@pytest.mark.parametrize(("kind", "dropout"), [("CNN", 0.0), ("CNN2", 0.3), ("CNN3", 0.3), ("MLP", 0.3)])
def test_trials_of_ray_tune(tmp_path: Path, kind: str, dropout: float) -> None:
    drop = [nn.Dropout(dropout)] if dropout else []
    a, b, c = (8, 6, 4) if kind == "CNN" else (6, 9, 6)
    layers: dict[str, list[nn.Module]] = {
        "CNN": [
            *(nn.Conv2d(1, a, 5), nn.MaxPool2d(2), nn.Tanh(), *drop, nn.Conv2d(a, b, 5), nn.MaxPool2d(2), nn.Tanh()),
            *(*drop, nn.Conv2d(b, c, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9 * c, 20), nn.Tanh(), *drop),
            nn.Linear(20, 10),
        ],
        "CNN3": [
            *(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), nn.Tanh(), nn.Dropout(), nn.Conv2d(16, 32, 3), nn.MaxPool2d(2)),
            *(nn.Tanh(), nn.Dropout(), nn.Conv2d(32, 15, 3), nn.MaxPool2d(2), nn.Tanh(), nn.Dropout(), nn.Flatten()),
            *(nn.Linear(60, 20), nn.Tanh(), *drop, nn.Linear(20, 10)),
        ],
        "MLP": [nn.Linear(14, 9), nn.Tanh(), *drop, nn.Linear(9, 8), nn.Tanh(), *drop, nn.Linear(8, 4)],
    }
    module = nn.ModuleList(layers["CNN" if kind == "CNN2" else kind]).eval()
    shape = {"CNN3": (3, 32, 32), "MLP": (14,)}.get(kind, (1, 28, 28))
    settings = {"model::type": kind, "model::nlin": "tanh", "model::dropout": dropout, "model::channels_in": shape[0]}
    settings |= {"model::i_dim": 14, "model::h_dim": [9, 8], "model::o_dim": 4, "training::trainset": None}
    made = ray_tune(tmp_path / "raw", settings, module, shape)
    store = import_zoo(read_ray_tune(tmp_path / "raw"), tmp_path / "zoo")
    assert store.rows["id"].tolist() == [0, 0, 1, 1]
    assert store.rows["step"].tolist() == [1, 2, 1, 2]
    assert store.rows["test_acc"].tolist() == [0.1, 0.2, 0.1, 0.2]
    assert store.rows["seed"].tolist() == [0, 0, 1, 1]
    x = torch.randn(2, *shape, generator=GENERATOR)
    for k, params in enumerate(made):
        y = x
        for i, layer in enumerate(module):
            own = {name: params[f"module_list.{i}.{name}"] for name in layer.state_dict()}
            y = functional_call(layer, own, (y,))
        torch.testing.assert_close(output(store, k, x), y)
    moved(store, x)
    assert [row["seed"] for row in read_ray_tune(tmp_path / "raw", "**seed=1/**").rows] == [1, 1]


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Return attention, computed by its formula."""
    q, k, v = (heads_of(one, heads) for one in (q, k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (scores @ v).transpose(1, 2).flatten(2)


def small_transformer(params: Params, x: Tensor) -> Tensor:
    """Return the outputs of networks of the Small Transformer Zoo, computed from their files."""
    width = params["classifier.fc1.weight"].shape[1]
    if "embedding.conv1.weight" in params:
        patch = params["embedding.conv1.weight"]
        x = functional.conv2d(x, patch, params["embedding.conv1.bias"], stride=patch.shape[-1])
        x = x.reshape(*x.shape[:2], -1).permute(0, 2, 1) + params["embedding.pos_embedding"]
    for k in itertools.count():
        if f"encoder.{k}.fc1.weight" not in params:
            break
        own = {n.removeprefix(f"encoder.{k}."): t for n, t in params.items()}
        x = functional.layer_norm(x, (width,))
        x = attention(*(x @ own[f"attention.{n}.weight"].T for n in ("queries", "keys", "values")), heads=2)
        x = functional.layer_norm(x @ own["attention.out_projection.weight"].T, (width,))
        x = (x @ own["fc1.weight"].T + own["fc1.bias"]).relu() @ own["fc2.weight"].T + own["fc2.bias"]
    x = functional.layer_norm(x, (width,)).mean(1)
    x = (x @ params["classifier.fc1.weight"].T + params["classifier.fc1.bias"]).relu()
    return x @ params["classifier.fc2.weight"].T + params["classifier.fc2.bias"]


def small_transformer_shapes(*, is_image: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if is_image:
        shapes = {"embedding.pos_embedding": (4, 8), "embedding.conv1.weight": (8, 1, 3, 3)}
        shapes["embedding.conv1.bias"] = (8,)
    for k in range(2):
        names = ("queries", "keys", "values", "out_projection")
        shapes |= {f"encoder.{k}.attention.{name}.weight": (8, 8) for name in names}
        for name, (before, after) in {"fc1": (8, 12), "fc2": (12, 8)}.items():
            shapes |= {f"encoder.{k}.{name}.weight": (after, before), f"encoder.{k}.{name}.bias": (after,)}
    for name, after in {"fc1": 8, "fc2": 5}.items():
        shapes |= {f"classifier.{name}.weight": (after, 8), f"classifier.{name}.bias": (after,)}
    return shapes


def write_small_transformers(folder: Path, runs: int, *, is_image: bool = True) -> dict[str, Params]:
    """Write files in the layout of the Small Transformer Zoo. The table lacks the last run."""
    name, best = ("mnist", "best1") if is_image else ("ag_news", "best")
    (folder / name).mkdir(parents=True)
    (folder / "metadata").mkdir()
    shapes, made, lines = small_transformer_shapes(is_image=is_image), {}, []
    for k in range(runs):
        run = f"{k * 5 % runs:02d}ab1e"  # The table has another order than the names.
        for epoch, hits in (("1", 1135), ("75", 9000 + k), ("100", 9100 + k), (best, 9200 + k)):
            file = f"{name}/{run}_{epoch}_{hits}.pt"
            params = {n: torch.randn(shape, generator=GENERATOR) / 3 for n, shape in shapes.items()}
            torch.save(params, folder / file)
            if epoch != best:
                made[file] = params
            line = {"seed": 3, "optimizer": "adam", "lr": 0.001 * (1 + k), "dropout": "", "n_attention_heads": 2}
            accuracy = "test_top1_accuracy" if is_image else "test_accuracy"
            lines.append(line | {"ckpt_epoch": epoch, "ckpt_file": file, accuracy: hits / 10_000})
    torch.save({"embedding.embedding.weight": torch.zeros(3, 8)}, folder / name / "embedding.pt")
    with open(folder / "metadata" / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines[: 4 * (runs - 1)])
    return made


@pytest.mark.parametrize("is_image", [True, False])
def test_the_small_transformer_zoo(is_image: bool, tmp_path: Path) -> None:
    made = write_small_transformers(tmp_path / "raw", 12, is_image=is_image)
    archive = shutil.make_archive(str(tmp_path / "MNIST-Transformers"), "zip", tmp_path, "raw")
    store = import_zoo(read_small_transformer_zoo(tmp_path / "raw"), tmp_path / "zoo")
    x = torch.randn(3, *((1, 6, 6) if is_image else (7, 8)), generator=GENERATOR)
    assert [row["file"] for row in store.rows.dicts()] == sorted(
        made, key=lambda name: (name.split("_")[-3], int(name.split("_")[-2]))
    )
    for k, row in enumerate(store.rows.dicts()):
        run, epoch, hits = row["file"].rpartition("/")[2].removesuffix(".pt").split("_")
        assert (row["run"], row["step"], row["test_accuracy"]) == (run, int(epoch), int(hits) / 10_000)
        assert "dropout" not in row or row["dropout"] is None
        torch.testing.assert_close(output(store, k, x), small_transformer(made[row["file"]], x))
    moved(store, x)
    kinds = {group.kind for group in store.symmetry.groups}  # type: ignore[union-attr]
    assert {"scaled", "nested"} & kinds
    # The paper's program: the networks of epoch 75 in the order of the table, without the run that it leaves out.
    names = [f"{k * 5 % 12:02d}ab1e" for k in range(11)]
    random.seed(3)
    random.shuffle(names)
    wanted = {run: "train" if k < 7 else "validation" if k < 8 else "test" for k, run in enumerate(names)}
    assert {row["run"]: row.get("split") for row in store.rows.dicts()} == wanted | {"07ab1e": None}
    zipped = read_small_transformer_zoo(archive)
    assert [{**row, "file": row["file"].removeprefix("raw/")} for row in zipped.rows] == list(
        read_small_transformer_zoo(tmp_path / "raw").rows
    )
    assert torch.equal(zipped.read([2]).params["encoder.1.fc1.bias"][0], network(store, 2)["encoder.1.fc1.bias"])


def test_other_small_transformers_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_small_transformers(raw, 3)
    with pytest.raises(FileNotFoundError, match=r"has no networks SET/RUN_EPOCH_HITS\.pt"):
        read_small_transformer_zoo(raw / "mnist")
    (raw / "ag_news").mkdir()
    shutil.copy(raw / "mnist" / "00ab1e_75_9000.pt", raw / "ag_news" / "00ab1e_75_9000.pt")
    with pytest.raises(ValueError, match=r"has networks in \['ag_news', 'mnist'\]; give the folder of one set"):
        read_small_transformer_zoo(raw)
    shutil.rmtree(raw / "ag_news")
    table = (raw / "metadata" / "mnist.csv").read_text()
    for changed, message in (
        (table.replace(",2,", ",3,"), "3 heads do not divide the width 8"),
        (table.replace(",2,best1", ",4,best1", 1), r"have \['2', '4'\] attention heads, but all must have one number"),
    ):
        (raw / "metadata" / "mnist.csv").write_text(changed)
        with pytest.raises(ValueError, match=message):
            read_small_transformer_zoo(raw)
    (raw / "metadata" / "mnist.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no metadata/mnist.csv; give the folder that contains 'metadata'"):
        read_small_transformer_zoo(raw)


def vit_model_zoo(params: Params, x: Tensor) -> Tensor:
    """Return the outputs of networks of ViTModelZoo, computed from their files, with GELU and LayerNorm by their
    formulas.
    """
    own = {name.removeprefix("vit."): tensor for name, tensor in params.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        return x * own[f"{name}.weight"] + own[f"{name}.bias"]

    patch = own["patch_embed.proj.weight"]
    x = functional.conv2d(x, patch, own["patch_embed.proj.bias"], stride=patch.shape[-1]).flatten(2).mT
    x = torch.cat([own["cls_token"].expand(len(x), -1, -1), x], 1) + own["pos_embed"]
    for k in range(2):
        qkv = linear(f"blocks.{k}.attn.qkv", norm(f"blocks.{k}.norm1", x))
        q, v = qkv[..., :12], qkv[..., 24:]
        x = x + linear(f"blocks.{k}.attn.proj", attention(q, qkv[..., 12:24], v, heads=6))
        hidden = linear(f"blocks.{k}.mlp.fc1", norm(f"blocks.{k}.norm2", x))
        x = x + linear(f"blocks.{k}.mlp.fc2", hidden * (1 + torch.erf(hidden / 2**0.5)) / 2)
    x = norm("norm", x)[:, 0]
    return linear("head.2", linear("head.0", x).relu()) if "head.0.weight" in own else linear("head", x)


VIT = {"model::type": "vit_s_16", "model::o_dim": 4, "model::head::hidden_dim": None, "dataset::name": "CIFAR100"}


def write_vit_model_zoo(folder: Path, bases: int = 1, trials: int = 2) -> dict[str, Params]:
    """Write files in the layout of ViTModelZoo: fine-tuned networks with both kinds of classifiers, in the folders of
    their bases.
    """
    blocks = {"norm1.weight": (12,), "norm1.bias": (12,), "attn.qkv.weight": (36, 12), "attn.qkv.bias": (36,)}
    blocks |= {"attn.proj.weight": (12, 12), "attn.proj.bias": (12,), "norm2.weight": (12,), "norm2.bias": (12,)}
    blocks |= {"mlp.fc1.weight": (20, 12), "mlp.fc1.bias": (20,), "mlp.fc2.weight": (12, 20), "mlp.fc2.bias": (12,)}
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, 12), "pos_embed": (1, 5, 12), "norm.weight": (12,)}
    shapes |= {"norm.bias": (12,), "patch_embed.proj.weight": (12, 3, 4, 4), "patch_embed.proj.bias": (12,)}
    shapes |= {f"blocks.{k}.{name}": shape for k in range(2) for name, shape in blocks.items()}
    heads: dict[bool, dict[str, tuple[int, ...]]] = {False: {"head.weight": (4, 12), "head.bias": (4,)}}
    heads[True] = {"head.0.weight": (7, 12), "head.0.bias": (7,), "head.2.weight": (4, 7), "head.2.bias": (4,)}
    made = {}
    for base, is_deep, seed in itertools.product(range(bases), (False, True), range(trials)):
        known = f"sl_vit_s_16_224_seed_{base}"
        trial = f"vit_cifar100_finetuned/{known}/sl_ft_SD_{seed}_HD_{7 if is_deep else 'NA'}_FCMLP_{is_deep}"
        (folder / trial).mkdir(parents=True)
        settings = VIT | {"model::head::mlp": is_deep, "seed": seed, "pretraining::model": known}
        settings |= {"model::head::hidden_dim": 7 if is_deep else None, "optim::lr": 0.1 + seed}
        (folder / trial / "config.json").write_text(json.dumps(settings))
        lines = []
        for epoch in (0, 1):
            all_shapes = shapes | heads[is_deep]
            params = {f"vit.{n}": torch.randn(shape, generator=GENERATOR) / 3 for n, shape in all_shapes.items()}
            place = folder / trial / f"checkpoint_{epoch:06d}"
            place.mkdir()
            torch.save(params, place / "checkpoints")
            torch.save({"state": {0: {"step": 3}}}, place / "optimizer")
            made[f"{trial}/checkpoint_{epoch:06d}/checkpoints"] = params
            accuracy = float(params["vit.head.2.bias" if is_deep else "vit.head.bias"].std())
            lines.append(json.dumps({"training_iteration": epoch, "test_acc": accuracy, "config": settings}))
        (folder / trial / "result.json").write_text("\n".join(lines))
    return made


def test_the_zoo_of_vision_transformers(tmp_path: Path) -> None:
    made = write_vit_model_zoo(tmp_path / "raw")
    with pytest.raises(ValueError, match=r"FCMLP_False' of .* has another architecture; .* `template` can select"):
        read_vit_model_zoo(tmp_path / "raw")
    x = torch.randn(3, 3, 8, 8, generator=GENERATOR)
    for is_deep in (False, True):
        source = read_vit_model_zoo(tmp_path / "raw", f"**FCMLP_{is_deep}**")
        store = import_zoo(source, tmp_path / f"zoo{is_deep}")
        assert store.rows["step"].tolist() == [0, 1, 0, 1]
        assert store.rows["seed"].tolist() == [0, 0, 1, 1]
        for k, row in enumerate(store.rows.dicts()):
            assert row["pretraining::model"] == "sl_vit_s_16_224_seed_0"
            torch.testing.assert_close(output(store, k, x), vit_model_zoo(made[row["file"]], x))
        moved(store, x)
    with pytest.raises(FileNotFoundError, match=r"checkpoints that fit '\*\*SD_7\*\*'"):
        read_vit_model_zoo(tmp_path / "raw", "**SD_7**")
    (config,) = (tmp_path / "raw").glob("**/*SD_0_HD_NA*/config.json")
    for change, message in (
        ({"model::type": "bert"}, "the trials have the model 'bert', but 'vit_s_16' is known"),
        ({"model::o_dim": None}, "config.json' describes no architecture"),
        ({"model::head::mlp": True}, "config.json' describes no architecture"),
        ({"model::o_dim": 5}, "has another architecture"),
    ):
        config.write_text(json.dumps(VIT | change))
        with pytest.raises(ValueError, match=message):
            read_vit_model_zoo(tmp_path / "raw", "**FCMLP_False**")


def test_any_folder_of_checkpoints(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    made = {}
    for lr in ("0.1", "1e-2"):
        for seed in range(2):
            for step in (5, 10):
                place = tmp_path / "raw" / f"lr{lr}" / f"seed{seed}"
                place.mkdir(parents=True, exist_ok=True)
                made[f"lr{lr}/seed{seed}/step{step}.pt"] = perturb(module)
                torch.save(
                    {"state_dict": made[f"lr{lr}/seed{seed}/step{step}.pt"], "epoch": 3}, place / f"step{step}.pt"
                )
    (tmp_path / "raw" / "notes.txt").write_text("not a checkpoint")
    store = import_zoo(read_folder(tmp_path / "raw", "lr{lr}/seed{seed}/step{step}.pt"), tmp_path / "zoo")
    assert len(store) == 8
    assert len(set(store.rows["id"].tolist())) == 4
    assert store.rows["lr"].tolist() == [0.1] * 4 + [0.01] * 4
    assert store.rows["step"].tolist() == [5, 10] * 4
    for k, row in enumerate(store.rows.dicts()):
        for name, tensor in made[row["file"]].items():
            assert torch.equal(network(store, k)[name], tensor)
    assert store.symmetry is None
    assert store.architecture.factory is None
    with pytest.raises(FileNotFoundError, match="no file below"):
        read_folder(tmp_path / "raw", "{id}.ckpt")
    with pytest.raises(ValueError, match="is not a name"):
        read_folder(tmp_path / "raw", "{the id}.pt")


def test_a_folder_with_its_model(tmp_path: Path) -> None:
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [3, 4, 2]})
    for k in (12, 7):
        torch.save(perturb(architecture.module()), tmp_path / f"net{k}.pth")
    source = read_folder(tmp_path, "net{id}.pth", architecture=architecture, inputs=(torch.randn(2, 3),))
    store = import_zoo(source, tmp_path / "zoo")
    assert store.rows["id"].tolist() == [7, 12]
    moved(store, torch.randn(4, 3, generator=GENERATOR))
    torch.save({"w": torch.zeros(2)}, tmp_path / "net3.pth")
    with pytest.raises(ValueError, match=r"net3.pth lacks 'layers.0.weight'"):
        import_zoo(read_folder(tmp_path, "net{id}.pth", architecture=architecture), tmp_path / "other")


def test_files_that_no_training_wrote_are_skipped(tmp_path: Path) -> None:
    """The test uses a zip file from macOS, and the unpacked zip file."""
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    torch.save({f"seq.{name}": tensor for name, tensor in perturb(module).items()}, tmp_path / "one.pth")
    with zipfile.ZipFile(tmp_path / "mlps.zip", "w") as archive:
        archive.write(tmp_path / "one.pth", "mlps/0.pth")
        for name in ("__MACOSX/mlps/._0.pth", "mlps/._0.pth", ".cache/1.pth", "__MACOSX/._0.pth"):
            archive.writestr(name, b"\0\5\x16\7")
        archive.extractall(tmp_path / ".hidden" / "mlps")
    for place in ("mlps.zip", ".hidden/mlps"):
        store = import_zoo(read_deep_align(tmp_path / place), tmp_path / "zoo" / place)
        assert store.rows["file"].tolist() == ["mlps/0.pth"]
        assert len(import_zoo(read_folder(tmp_path / place, "**.pth"), tmp_path / "folder" / place)) == 1


def test_zip_files_that_are_damaged(tmp_path: Path) -> None:
    torch.save(nn.Linear(6, 4).state_dict(), tmp_path / "one.pth")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "one.pth", "0.pth")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[60:80] = bytes(20)
    (tmp_path / "b.zip").write_bytes(content)
    with pytest.raises(ValueError, match=r"'0.pth' in '.*b.zip' is damaged .*fetch it again"):
        read_folder(tmp_path / "b.zip", "{id}.pth")
    (tmp_path / "c.zip").write_bytes(content[:-8])
    with pytest.raises(ValueError, match="neither a folder nor a zip file"):
        read_folder(tmp_path / "c.zip", "{id}.pth")


def test_what_lies_beside_the_parameters(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2), "label": torch.tensor(3)}
    torch.save(state, tmp_path / "0.pt")
    safetensors.torch.save_file(state, tmp_path / "0.safetensors")
    for suffix in ("pt", "safetensors"):
        source = read_folder(tmp_path, f"{{id}}.{suffix}", beside=["label", "absent"])
        store = import_zoo(source, tmp_path / "zoos" / suffix)
        assert [spec.name for spec in store.architecture.layout] == ["w"]
        assert store.rows["label"].tolist() == [3]
    with pytest.raises(ValueError, match=r"\['step'\] cannot be read from files next to .* write \{id\} and \{step\}"):
        read_folder(tmp_path, "{id}.pt", beside=["label", "step"])


@pytest.mark.parametrize("row", ["no JSON", "[1, 2]", "3"])
def test_metadata_of_other_programs_are_no_rows(tmp_path: Path, row: str) -> None:
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "0.safetensors", {"row": row})
    store = import_zoo(read_folder(tmp_path, "{id}.safetensors"), tmp_path / "zoo")
    assert store.rows.dicts() == [{"id": 0, "step": 0, "file": "0.safetensors", "is_finite": True}]


LINEAR = Architecture("linear", "regauge.nets.mlp:mlp", {"widths": [3, 2]})


def saved(folder: Path, *names: str) -> None:
    """Return files of networks with a given architecture, so that an import reads no file twice."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(perturb(LINEAR.module()), folder / name)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "shards").iterdir())}


def test_an_interrupted_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "BLOCK_NETWORKS", 2)
    saved(tmp_path / "raw", *(f"{k}.pt" for k in range(5)))

    def interrupt(label: str, total: float) -> Callable[..., None]:
        def advance(amount: float) -> None:
            raise KeyboardInterrupt

        return advance

    def read(folder: str, progress: Progress) -> Store:
        return import_zoo(
            read_folder(tmp_path / "raw", "{id}.pt", architecture=LINEAR), tmp_path / folder, progress=progress
        )

    told = Recorded()
    whole = read("whole", told)
    assert told.amounts == [2, 2, 1]
    assert told.totals == [5]
    with pytest.raises(KeyboardInterrupt):
        read("parts", interrupt)
    for k in (0, 1):
        (tmp_path / "raw" / f"{k}.pt").write_bytes(b"is not read again")
    told = Recorded()
    monkeypatch.chdir(tmp_path)
    parts = import_zoo(read_folder("raw", "{id}.pt", architecture=LINEAR), "parts", progress=told)
    assert told.amounts == [2, 1]
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")
    assert parts.rows.dicts() == whole.rows.dicts()
    told = Recorded()
    for k in (2, 3, 4):
        (tmp_path / "raw" / f"{k}.pt").write_bytes(b"is not read again")
    assert len(read("parts", told)) == 5
    assert told.amounts == []


def test_a_store_is_filled_from_one_source(tmp_path: Path) -> None:
    for source in ("a", "b"):
        saved(tmp_path / source, "0.pt", "1.pt")
    import_zoo(read_folder(tmp_path / "a", "{id}.pt", architecture=LINEAR), tmp_path / "zoo")
    before = shards(tmp_path / "zoo")
    with pytest.raises(FileExistsError, match=r"holds the networks of '.*/a', not of '.*/b'; choose another folder"):
        import_zoo(read_folder(tmp_path / "b", "{id}.pt", architecture=LINEAR), tmp_path / "zoo")
    with pytest.raises(FileExistsError, match="other networks or settings"):
        import_zoo(read_folder(tmp_path / "a", "{name}.pt", architecture=LINEAR), tmp_path / "zoo")
    assert shards(tmp_path / "zoo") == before


def test_what_a_source_gained_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "BLOCK_NETWORKS", 4)
    ids = [1, 2, 4, 5, 6, 10]
    saved(tmp_path / "raw", *(f"net{k}.pt" for k in ids))
    import_zoo(read_folder(tmp_path / "raw", "net{id}.pt"), tmp_path / "zoo")
    before = shards(tmp_path / "zoo")
    saved(tmp_path / "raw", *(f"net{k}.pt" for k in (0, 3, 7, 11)))
    for expected in ([2, 1, 1], []):
        told = Recorded()
        store = import_zoo(read_folder(tmp_path / "raw", "net{id}.pt"), tmp_path / "zoo", progress=told)
        assert told.amounts == expected
        assert sorted(store.rows["id"].tolist()) == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    for name, content in before.items():
        assert shards(tmp_path / "zoo")[name] == content
    for k, row in enumerate(store.rows.dicts()):
        assert row["file"] == f"net{row['id']}.pt"
        for name, tensor in torch.load(tmp_path / "raw" / row["file"]).items():
            assert torch.equal(network(store, k)[name], tensor)


def test_ids_that_stand_for_several_trajectories_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "raw", *(f"lr{lr}/{k}.pt" for lr in (0.1, 0.2) for k in range(3)))
    saved(tmp_path / "steps", *(f"{a}/run/step{k}.pt" for a in "xy" for k in (1, 2)))
    message = r"'lr0.1/0.pt' and 'lr0.2/0.pt' of '.*raw' are both step 0 of trajectory 0, .* are then numbered"
    with pytest.raises(ValueError, match=message):
        import_zoo(read_folder(tmp_path / "raw", "lr{lr}/{id}.pt"), tmp_path / "zoo")
    with pytest.raises(ValueError, match=r"'x/run/step1.pt' and 'y/run/step1.pt' .* are both step 1 of trajectory 0"):
        import_zoo(read_folder(tmp_path / "steps", "**/{name}/step{step}.pt"), tmp_path / "zoo")
    assert not (tmp_path / "zoo").exists()
    store = import_zoo(read_folder(tmp_path / "raw", "lr{lr}/{seed}.pt"), tmp_path / "zoo")
    assert store.rows["id"].tolist() == store.rows.final().tolist() == list(range(6))
    assert store.rows["seed"].tolist() == [0, 1, 2] * 2


def test_a_source_that_counts_its_networks_otherwise_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "raw", "b.pth", "d.pth")
    import_zoo(read_folder(tmp_path / "raw", "**.pth"), tmp_path / "zoo")
    saved(tmp_path / "raw", "e.pth")
    assert len(import_zoo(read_folder(tmp_path / "raw", "**.pth"), tmp_path / "zoo")) == 3
    before = shards(tmp_path / "zoo")
    saved(tmp_path / "raw", "c.pth")
    with pytest.raises(ValueError, match=r"trajectory 1 is 'd.pth' in the store .*, but 'c.pth' in .*another folder"):
        import_zoo(read_folder(tmp_path / "raw", "**.pth"), tmp_path / "zoo")
    assert shards(tmp_path / "zoo") == before


def test_arrays_that_grow(tmp_path: Path) -> None:
    weights = write_small_cnn_zoo(tmp_path / "raw")
    with gzip.open(tmp_path / "raw" / "metrics.csv.gz", "rt", newline="") as file:
        lines = file.readlines()

    def read(order: list[int]) -> Store:
        np.save(tmp_path / "raw" / "weights.npy", weights[order])
        with gzip.open(tmp_path / "raw" / "metrics.csv.gz", "wt", newline="") as file:
            file.writelines([lines[0], *(lines[1 + k] for k in order)])
        return import_zoo(read_small_cnn_zoo(tmp_path / "raw"), tmp_path / "zoo")

    assert read([0, 1, 3]).rows["id"].tolist() == [0, 0, 1]
    store = read([0, 1, 2, 3, 5])
    assert sorted(zip(store.rows["id"].tolist(), store.rows["step"].tolist(), strict=True)) == [
        *((0, 0), (0, 60), (0, 86)),
        *((1, 0), (1, 86)),
    ]
    for k, row in enumerate(store.rows.dicts()):
        place = [0, 60, 86].index(row["step"]) + 3 * row["id"]
        assert torch.equal(network(store, k)["output.bias"], torch.from_numpy(weights[place, -60:-50]))
    with pytest.raises(ValueError, match=r"trajectory 0 is '/dir/0' in the store .*, but '/dir/1' in"):
        read([3, 0, 1, 2])


def test_networks_of_several_architectures_are_not_mixed(tmp_path: Path) -> None:
    for k, width in enumerate((3, 3, 4)):
        torch.save(nn.Linear(width, 2).state_dict(), tmp_path / f"{k}.pt")
    with pytest.raises(ValueError, match=r"'2.pt' has shape \(2, 4\) of float32 as 'weight', but .* \(2, 3\)"):
        import_zoo(read_folder(tmp_path, "{id}.pt"), tmp_path / "zoo")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "0.pt")
    with pytest.raises(ValueError, match="could run any code"):
        read_folder(tmp_path, "{id}.pt")
    (tmp_path / "0.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a readable torch file"):
        read_folder(tmp_path, "{id}.pt")
    torch.save({"w": torch.zeros(2), "label": 3}, tmp_path / "0.pt")
    with pytest.raises(ValueError, match=r"no tensors \(\['label'\]\)"):
        read_folder(tmp_path, "{id}.pt")
    assert len(import_zoo(read_folder(tmp_path, "{id}.pt", beside=["label"]), tmp_path / "zoo")) == 1


def test_flat_networks_in_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra 'hdf5'")
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [3, 4, 2]})
    parts = [perturb(architecture.module()) for _ in range(3)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["dataset"] = np.stack([torch.cat([t.flatten() for t in part.values()]).numpy() for part in parts])
    store = import_zoo(
        read_hdf5(tmp_path / "a.h5", architecture=architecture, inputs=(torch.randn(2, 3),)), tmp_path / "z"
    )
    for k, part in enumerate(parts):
        for name, tensor in part.items():
            assert torch.equal(network(store, k)[name], tensor)
    moved(store, torch.randn(4, 3, generator=GENERATOR))
    with pytest.raises(ValueError, match="no data set 'weights'"):
        read_hdf5(tmp_path / "a.h5", architecture=architecture, dataset="weights")
    with pytest.raises(ValueError, match="have 32 values"):
        read_hdf5(tmp_path / "a.h5", architecture=Architecture("m", "regauge.nets.mlp:mlp", {"widths": [3, 5, 2]}))
    with pytest.raises(FileNotFoundError, match="no file"):
        read_hdf5(tmp_path / "b.h5", architecture=architecture)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["dataset"] = np.stack([torch.cat([t.flatten() for t in part.values()]).numpy() for part in parts * 2])
    source = read_hdf5(tmp_path / "a.h5", architecture=architecture, inputs=(torch.randn(2, 3),))
    assert import_zoo(source, tmp_path / "z").rows["id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(network(Store.open(tmp_path / "z"), 4)["layers.0.weight"], parts[1]["layers.0.weight"])
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'regauge\[hdf5\]'"):
        read_hdf5(tmp_path / "a.h5", architecture=architecture)


def small_store(folder: Path) -> Store:
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [3, 4, 2]})
    store = Store.create(folder, architecture)
    parts = [perturb(architecture.module()) for _ in range(5)]
    params = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    store.append(params, [{"id": k, "step": 10, "label": k, "lr": 0.1} for k in range(5)])
    return store


def test_one_file_for_each_network(tmp_path: Path) -> None:
    store = small_store(tmp_path / "zoo")
    told = Recorded()
    EXPORTERS["safetensors"](store, tmp_path / "out", [4, 0, 2], progress=told)
    assert sum(told.amounts) == 3
    again = import_zoo(read_folder(tmp_path / "out", "{id}-{step}.safetensors"), tmp_path / "again")
    assert again.rows["id"].tolist() == [0, 2, 4]
    for name, tensor in store.read([0, 2, 4]).items():
        assert torch.equal(again.read(range(3))[name], tensor)
    for before, after in zip(store.rows.dicts([0, 2, 4]), again.rows.dicts(), strict=True):
        assert after == before | {"file": f"{before['id']}-10.safetensors"}
    with safe_open(tmp_path / "out" / "4-10.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["row"])["label"] == 4
    with pytest.raises(FileExistsError, match="holds files already"):
        EXPORTERS["safetensors"](store, tmp_path / "out", [0], progress=told)
    with pytest.raises(ValueError, match="same id and step"):
        EXPORTERS["safetensors"](store, tmp_path / "twice", [0, 0], progress=told)
    assert not (tmp_path / "twice").exists()


def test_one_array_for_all_networks(tmp_path: Path) -> None:
    store = small_store(tmp_path / "zoo")
    EXPORTERS["npy"](store, tmp_path / "out", range(5))
    weights = np.load(tmp_path / "out" / "weights.npy")
    params = store.read(range(5))
    assert weights.shape == (5, store.architecture.size)
    with open(tmp_path / "out" / "layout.csv", newline="") as file:
        for line in csv.DictReader(file):
            piece = weights[:, int(line["start_idx"]) : int(line["end_idx"])]
            assert np.array_equal(piece, params[line["varname"]].reshape(5, -1).numpy())
    with open(tmp_path / "out" / "rows.csv", newline="") as file:
        assert [line["label"] for line in csv.DictReader(file)] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("read", "match"),
    [
        (read_dwsnets, "no files of DWSNets' folders"),
        (read_deep_align, "no files of Deep-Align"),
        (read_ray_tune, "no trials of Ray Tune"),
        (read_small_cnn_zoo, "no weights.npy"),
        (read_vit_model_zoo, "no trials of Ray Tune"),
        (read_small_transformer_zoo, "has no networks SET/RUN_EPOCH_HITS.pt"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, read: Callable[[Path], Source], match: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(FileNotFoundError, match=match):
        read(tmp_path)


def test_other_networks_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a chain has seq\.0\.weight"):
        read_deep_align(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a zip"):
        read_deep_align(Path(__file__))
    with pytest.raises(FileNotFoundError, match="no folder or zip file"):
        read_deep_align(tmp_path / "absent.zip")
