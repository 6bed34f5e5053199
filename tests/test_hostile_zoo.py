"""Populations with random damage, from other programs and in stores: each population is read, or refused in a
sentence.
"""

import csv
import gzip
import io
import json
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import LIMITED, Kind, bounded, check_kind, damage_bytes

from regauge.checkpoints.formats.headers import read_header
from regauge.storage import Store, verify
from regauge.storage.architecture import Architecture
from regauge.zoo import Source, import_zoo
from regauge.zoo.formats.folder import read_deep_align, read_dwsnets, read_folder
from regauge.zoo.formats.matrix_zoos import read_hdf5, read_small_cnn_zoo
from regauge.zoo.formats.ray_tune import read_ray_tune, read_vit_model_zoo
from regauge.zoo.formats.small_transformers import read_small_transformer_zoo

EXAMPLES = [pytest.param(25), pytest.param(300, marks=pytest.mark.thorough)]
"""The number of populations that are tried."""
MLP = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]})
GENERATOR = torch.Generator().manual_seed(0)


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=GENERATOR) for name, shape in shapes.items()}


def _chain(step: int) -> dict[str, torch.Tensor]:
    sizes = [(2, 4), (4, 4), (4, 1)]
    shapes: dict[str, tuple[int, ...]] = {}
    for k, (before, after) in enumerate(sizes):
        shapes |= {f"seq.{k * step}.weight": (after, before), f"seq.{k * step}.bias": (after,)}
    return _drawn(shapes)


def _imported(source: Source, folder: Path) -> Store:
    """Return the import of a source, in a separate store."""
    shutil.rmtree(folder / "imported", ignore_errors=True)
    store = import_zoo(source, folder / "imported")
    assert len(store) == len(source.rows)
    _read_all(store)
    return store


def _read_all(store: Store) -> None:
    """Run all operations on the networks of a store and on their metadata."""
    names = store.rows.names
    assert len(store.rows.summary()) == len(names)
    assert len(store.rows.dicts()) == len(store.read(range(len(store)))[store.architecture.layout[0].name])
    store.split()
    store.rows.final()
    for name in names:
        store.rows.where(**{name: 1})
        store.rows.where(**{name: None})
    assert str(store.shards)


def _tables(rows: Any) -> bytes:
    """Return any rows of a document as CSV."""
    text = io.StringIO()
    rows = rows if isinstance(rows, list) else [rows]
    names = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([row.get(name, "") for name in names] if isinstance(row, dict) else [row] for row in rows)
    return text.getvalue().encode()


def _array_bytes(header: Any, values: bytes) -> bytes:
    text = repr(header).encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text + values


SHAPES = {"conv2d/kernel:0": (3, 3, 1, 2), "conv2d/bias:0": (2,), "dense/kernel:0": (2, 3), "dense/bias:0": (3,)}
ENDS = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES.values())]).tolist()


def _matrix_document(folder: Path) -> Any:
    return {
        "layout": [
            {"varname": name, "shape": str(shape), "start_idx": start, "end_idx": end}
            for (name, shape), start, end in zip(SHAPES.items(), ENDS[:-1], ENDS[1:], strict=True)
        ],
        "metrics": [
            {"modeldir": f"a/{k}", "step": 10 * j, "config.activation": "relu", "test_accuracy": 0.1 * j}
            for k in range(2)
            for j in range(2)
        ],
        "weights": {"descr": "<f4", "fortran_order": False, "shape": [4, ENDS[-1]]},
    }


def _matrix(folder: Path, document: Any) -> Store:
    return _imported(read_small_cnn_zoo(_write_matrices(folder, document)), folder)


def _write_matrices(folder: Path, document: Any) -> Path:
    place = folder / "matrix"
    place.mkdir(exist_ok=True)
    document = document if isinstance(document, dict) else {"layout": document}
    (place / "layout.csv").write_bytes(_tables(document.get("layout", [])))
    (place / "metrics.csv.gz").write_bytes(gzip.compress(_tables(document.get("metrics", [])), 1))
    header = document.get("weights")
    if isinstance(header, dict) and isinstance(header.get("shape"), list):
        header = {**header, "shape": tuple(header["shape"])}
    (place / "weights.npy").write_bytes(_array_bytes(header, bytes(16 * ENDS[-1])))
    return place


SETTINGS = {
    "model::type": "MLP", "model::i_dim": 3, "model::h_dim": [4, 4], "model::o_dim": 2, "model::nlin": "tanh",
    "model::dropout": 0.0, "seed": 1,
}  # fmt: skip


def _trials_document(folder: Path) -> Any:
    results = [{"training_iteration": k, "test_acc": 0.1 * k, "config": {}} for k in range(2)]
    return {"trial_a": {"params": SETTINGS, "results": results}, "trial_b": {"params": SETTINGS, "results": results}}


def _trials(folder: Path, document: Any) -> Store:
    """Write trials with any names to a zip file."""
    content = io.BytesIO()
    layers = {"module_list.0": (4, 3), "module_list.2": (4, 4), "module_list.4": (2, 4)}
    shapes = {f"{name}.weight": shape for name, shape in layers.items()}
    torch.save(_drawn(shapes | {f"{name}.bias": shape[:1] for name, shape in layers.items()}), content)
    document = document if isinstance(document, dict) else {"trial": document}
    with zipfile.ZipFile(folder / "trials.zip", "w") as archive:
        for name, trial in document.items():
            trial = trial if isinstance(trial, dict) else {"params": trial}
            archive.writestr(f"{name}/params.json", json.dumps(trial.get("params")))
            results = trial.get("results")
            lines = results if isinstance(results, list) else [results]
            archive.writestr(f"{name}/result.json", "\n".join(map(json.dumps, lines)))
            for k in range(2):
                archive.writestr(f"{name}/checkpoint_{k}/checkpoints", content.getvalue())
    return _imported(read_ray_tune(folder / "trials.zip"), folder)


VIT = {"model::type": "vit_s_16", "model::o_dim": 2, "model::head::mlp": True, "model::head::hidden_dim": 3, "seed": 1}


def _vits_document(folder: Path) -> Any:
    results = [{"training_iteration": 0, "test_acc": 0.1}]
    return {"a": {"config": VIT, "results": results}, "b": {"config": VIT, "results": []}}


def _vits(folder: Path, document: Any) -> Store:
    """Write vision transformers with any settings to a zip file."""
    norm = {"weight": (6,), "bias": (6,)}
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, 6), "pos_embed": (1, 5, 6)}
    maps = {"patch_embed.proj": (6, 1, 2, 2), "blocks.0.attn.qkv": (18, 6), "blocks.0.attn.proj": (6, 6)}
    maps |= {"blocks.0.mlp.fc1": (4, 6), "blocks.0.mlp.fc2": (6, 4), "head.0": (3, 6), "head.2": (2, 3)}
    shapes |= {f"{name}.{key}": v for name in ("norm", "blocks.0.norm1", "blocks.0.norm2") for key, v in norm.items()}
    shapes |= {f"{name}.weight": shape for name, shape in maps.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in maps.items()}
    content = _torch_bytes(_drawn({f"vit.{name}": shape for name, shape in shapes.items()}))
    document = document if isinstance(document, dict) else {"a": document}
    with zipfile.ZipFile(folder / "vits.zip", "w") as archive:
        for name, trial in document.items():
            trial = trial if isinstance(trial, dict) else {"config": trial}
            archive.writestr(f"{name}/config.json", json.dumps(trial.get("config")))
            results = trial.get("results")
            lines = results if isinstance(results, list) else [results]
            archive.writestr(f"{name}/result.json", "\n".join(map(json.dumps, lines)))
            archive.writestr(f"{name}/checkpoint_000000/checkpoints", content)
    return _imported(read_vit_model_zoo(folder / "vits.zip"), folder)


def _texts_document(folder: Path) -> Any:
    return [
        {"lr": 0.1 * k, "n_attention_heads": 2, "ckpt_epoch": "75", "ckpt_file": f"ag_news/{run}_75_900{k}.pt"}
        for k, run in enumerate("abc")
    ]


def _texts(folder: Path, document: Any) -> Store:
    """Write networks of the Small Transformer Zoo with any table to a zip file."""
    names = ("queries", "keys", "values", "out_projection")
    shapes: dict[str, tuple[int, ...]] = {f"encoder.0.attention.{name}.weight": (4, 4) for name in names}
    maps = {"encoder.0.fc1": (6, 4), "encoder.0.fc2": (4, 6), "classifier.fc1": (4, 4), "classifier.fc2": (3, 4)}
    shapes |= {f"{name}.weight": shape for name, shape in maps.items()}
    content = _torch_bytes(_drawn(shapes | {f"{name}.bias": shape[:1] for name, shape in maps.items()}))
    with zipfile.ZipFile(folder / "texts.zip", "w") as archive:
        archive.writestr("AG-News-Transformers/metadata/ag_news.csv", _tables(document))
        for k, run in enumerate("abc"):
            archive.writestr(f"AG-News-Transformers/ag_news/{run}_75_900{k}.pt", content)
    return _imported(read_small_transformer_zoo(folder / "texts.zip"), folder)


def _named_document(folder: Path) -> Any:
    rows = [{"accuracy": 0.1 * k, "label": "ab"[k], "tags": ["x", k], "is_new": True} for k in range(2)]
    names = ("lr0.1/0/step0.safetensors", "lr0.01/1/step10.safetensors")
    return [{"name": name, "row": row} for name, row in zip(names, rows, strict=True)]


def _named(folder: Path, document: Any) -> Store:
    """Write networks to a zip file, identified by their names and headers."""
    files = [one if isinstance(one, dict) else {"name": one} for one in document] if isinstance(document, list) else []
    with warnings.catch_warnings(), zipfile.ZipFile(folder / "named.zip", "w") as archive:
        warnings.simplefilter("ignore")  # about two files of one name
        for file in files:
            archive.writestr(str(file.get("name")) or "-", _safetensors(file.get("row")))
    return _imported(read_folder(folder / "named.zip", "lr{lr}/{id}/step{step}.safetensors"), folder)


def _safetensors(row: Any) -> bytes:
    header = {
        "__metadata__": {"row": json.dumps(row)},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(32)


SHARD = "s.safetensors"


def _new_store(folder: Path) -> Store:
    shutil.rmtree(folder / "store", ignore_errors=True)
    store = Store.create(folder / "store", MLP)
    params = {spec.name: torch.randn(4, *spec.shape, generator=GENERATOR) for spec in MLP.layout}
    rows = [
        {"id": k // 2, "step": k % 2, "accuracy": 0.1 * k, "label": "ab"[k % 2], "is_old": k > 2, "seed": 3}
        | ({"depth": k} if k else {})
        for k in range(4)
    ]
    store.append(params, rows, name="s")
    return store


def _shard_document(folder: Path) -> Any:
    """Return the header of a shard, with its columns."""
    path = _new_store(folder).path_of("s")
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    (folder / "values").write_bytes(content[read_header(path).start :])
    metadata = header["__metadata__"]
    return header | {"__metadata__": metadata | {"columns": json.loads(metadata["columns"])}}


def _shard(folder: Path, document: Any) -> Store:
    if isinstance(document, dict) and isinstance(document.get("__metadata__"), dict):
        metadata = document["__metadata__"]
        if "columns" in metadata:
            document = document | {"__metadata__": metadata | {"columns": json.dumps(metadata["columns"])}}
    text = json.dumps(document).encode()
    content = len(text).to_bytes(8, "little") + text + (folder / "values").read_bytes()
    (folder / "store" / "shards" / SHARD).write_bytes(content)
    store = Store.open(folder / "store")
    _read_all(store)
    verify(folder / "store")
    return store


POPULATIONS: dict[str, Kind] = {
    "small CNN zoo": Kind(_matrix, _matrix_document, "matrix"),
    "trials": Kind(_trials, _trials_document, "trials.zip"),
    "vision transformers": Kind(_vits, _vits_document, "vits.zip"),
    "small transformers": Kind(_texts, _texts_document, "texts.zip"),
    "named files": Kind(_named, _named_document, "named.zip"),
    "shard": Kind(_shard, _shard_document, SHARD),
}
"""Populations whose parts are documents."""


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", POPULATIONS)
def test_a_changed_population_is_read_or_refused(kind: str, examples: int, tmp_path: Path) -> None:
    check_kind(POPULATIONS[kind], tmp_path, examples)


def _torch_bytes(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _write_dwsnets(folder: Path) -> Path:
    path = folder / "mnist_png_training_3_0" / "checkpoints" / "model_final.pth"
    path.parent.mkdir(parents=True)
    torch.save(_chain(1), path)
    return path


def _write_deep_align(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "deep.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(2):
            archive.writestr(f"{k}.pth", _torch_bytes({**_chain(2), "label": k}))
    return folder / "deep.zip"


def _write_matrix(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        return _write_matrices(folder, _matrix_document(folder)) / name

    return write


def _write_shard(folder: Path) -> Path:
    return _new_store(folder).path_of("s")


def _write_hdf5(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "n.h5", "w") as file:
        file["dataset"] = np.ones((3, MLP.size), np.float32)
    return folder / "n.h5"


@dataclass(frozen=True)
class Damaged:
    """A file whose bytes are damaged: the function that writes it, the function that reads its population, and its
    name.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    named: str


DAMAGED: dict[str, Damaged] = {
    "dwsnets": Damaged(
        _write_dwsnets, lambda folder: _imported(read_dwsnets(folder), folder.parent), "model_final.pth"
    ),
    "deep-align": Damaged(
        _write_deep_align, lambda folder: _imported(read_deep_align(folder / "deep.zip"), folder.parent), "deep.zip"
    ),
    "weights": Damaged(
        _write_matrix("weights.npy"),
        lambda folder: _imported(read_small_cnn_zoo(folder / "matrix"), folder.parent),
        "weights.npy",
    ),
    "metrics": Damaged(
        _write_matrix("metrics.csv.gz"),
        lambda folder: _imported(read_small_cnn_zoo(folder / "matrix"), folder.parent),
        "metrics.csv.gz",
    ),
    "hdf5": Damaged(
        _write_hdf5,
        lambda folder: _imported(read_hdf5(folder / "n.h5", architecture=MLP), folder.parent),
        "n.h5",
    ),
    "shard": Damaged(_write_shard, lambda folder: _read_all(Store.open(folder / "store")), SHARD),
}


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_population_with_other_bytes_is_read_or_refused(kind: str, examples: int, tmp_path: Path) -> None:
    one = DAMAGED[kind]
    (tmp_path / "source").mkdir()
    path = one.write(tmp_path / "source")
    one.read(tmp_path / "source")
    refused = damage_bytes(lambda _: one.read(tmp_path / "source"), path, examples)
    assert all(one.named in told for told in refused), [told for told in refused if one.named not in told][:3]


def test_the_text_of_an_architecture_calls_nothing(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", MLP)
    document = json.loads((store.folder / "store.json").read_text())
    for layout in ([], {}):
        document["architecture"] |= {
            "factory": "pathlib:Path.touch",
            "settings": {"self": {"import": "pathlib:Path"}},
            "layout": layout,
        }
        (store.folder / "store.json").write_text(json.dumps(document))
        with pytest.raises(ValueError, match=r"store\.json' does not describe a store \(its layout names no tensor\)"):
            Store.open(store.folder)


def _trial(settings: dict[str, Any]) -> Callable[[Path], object]:
    return lambda folder: _trials(folder, {"a": {"params": {**SETTINGS, **settings}, "results": []}})


def _layers(**changes: str) -> Callable[[Path], object]:
    """Write the small CNN zoo with other values in the first line of the layout."""

    def read(folder: Path) -> object:
        document = _matrix_document(folder)
        document["layout"][0] |= changes
        return _matrix(folder, document)

    return read


def _deep(content: object) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        with zipfile.ZipFile(folder / "deep.zip", "w") as archive:
            archive.writestr("0.pth", _torch_bytes(content))
        return _imported(read_deep_align(folder / "deep.zip"), folder)

    return read


def _bomb(method: int) -> Callable[[Path], object]:
    """Write a zip file with far more zeros than bytes."""

    def read(folder: Path) -> object:
        with (
            zipfile.ZipFile(folder / "bomb.zip", "w", method) as archive,
            archive.open("0.pth", "w", force_zip64=True) as file,
        ):
            file.write(bytes(3 << 20 if method == zipfile.ZIP_DEFLATED else 3 << 10))
        return _imported(read_folder(folder / "bomb.zip", "{id}.pth"), folder)

    return read


def _metrics(content: bytes) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        place = _write_matrices(folder, _matrix_document(folder))
        (place / "metrics.csv.gz").write_bytes(gzip.compress(content, 1))
        return _imported(read_small_cnn_zoo(place), folder)

    return read


def _hdf5(make: Callable[[Any, Path], object]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "n.h5", "w") as file:
            make(file, folder)
        return _imported(read_hdf5(folder / "n.h5", architecture=MLP), folder)

    return read


def _outside(file: Any, folder: Path) -> None:
    (folder / "secret").write_bytes(bytes(4 * MLP.size))
    file.create_dataset("dataset", (1, MLP.size), "f4", external=str(folder / "secret"))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "wide inputs": (_trial({"model::i_dim": 10**12}), "trials.zip/a' cannot be imported: .* many more values"),
    "wide layers": (_trial({"model::h_dim": [10**9]}), "trials.zip/a' cannot be imported: .* many more values"),
    "no widths": (_trial({"model::h_dim": None}), "trials.zip/a' cannot be imported: .* cannot be called"),
    "no inputs": (_trial({"model::i_dim": None, "model::type": "CNN"}), "trials.zip/a/params.json' describes no"),
    "no trial": (lambda folder: _trials(folder, {"a": None}), "params.json' holds a NoneType"),
    "large head": (
        lambda folder: _vits(folder, {"a": {"config": VIT | {"model::head::hidden_dim": 10**12}, "results": []}}),
        "vits.zip/a' cannot be imported: .* many more values",
    ),
    "no heads": (
        lambda folder: _texts(folder, [row | {"n_attention_heads": 0} for row in _texts_document(folder)]),
        "texts.zip/.*cannot be imported: .* 0 heads do not divide",
    ),
    "no epoch": (
        lambda folder: _trials(folder, {"a": {"params": SETTINGS, "results": [{"training_iteration": "x"}]}}),
        "result.json' has a line without",
    ),
    "shape of digits": (_layers(shape="(" + "9" * 5000 + ",)"), "layout.csv' is not a layout"),
    "infinite shape": (_layers(shape="1e999"), "layout.csv' is not a layout"),
    "deep shape": (_layers(shape="(" * 3000), "layout.csv' is not a layout"),
    "negative shape": (_layers(shape="(-3, -3, 1, 2)"), "layout.csv' is not a layout"),
    "unknown variable": (_layers(varname="x"), "layout.csv' cannot be imported"),
    "metrics in another text": (_metrics(b"step,modeldir\n0,\x81\n"), "metrics.csv.gz' is not a table"),
    "metrics of a long cell": (_metrics(b"step\n" + b"1" * (1 << 18)), "metrics.csv.gz' is not a table"),
    "tight metrics": (_metrics(bytes(3 << 20)), "metrics.csv.gz' would unpack to more than"),
    "repeated values": (_deep({"seq.0.weight": torch.zeros(1).expand(10**9, 4)}), "expands 4 bytes"),
    "sparse values": (_deep({"seq.0.weight": torch.zeros(3, 4).to_sparse()}), "0.pth' is torch.sparse_coo"),
    "scalars": (_deep({"seq.0.weight": torch.ones(()), "seq.0.bias": torch.ones(())}), "0.pth' has the tensors"),
    "tight zip file": (_bomb(zipfile.ZIP_DEFLATED), "bomb.zip' is damaged .*would unpack to"),
    "other zip file": (_bomb(zipfile.ZIP_BZIP2), "bomb.zip' is damaged .*not packed by deflate"),
    "long number": (
        lambda folder: _named(folder, [{"name": "lr1/1/step1.safetensors", "row": {"a": 10**30}}]),
        "named.zip' cannot be imported: column 'a' has the integer",
    ),
    "no values": (_hdf5(lambda file, _: file.create_dataset("dataset", (10**9, MLP.size), "f4", chunks=True)), "n.h5'"),
    "long number among others": (
        lambda folder: _named(
            folder, [{"name": f"lr1/{k}/step1.safetensors", "row": {"a": [0.5, 10**400][k]}} for k in range(2)]
        ),
        "named.zip' cannot be imported: column 'a' has an integer",
    ),
    "two of a name": (
        lambda folder: _named(folder, [{"name": "lr1/1/step1.safetensors", "row": {"a": k}} for k in range(2)]),
        "named.zip' contains two files 'lr1/1/step1.safetensors'",
    ),
    "values elsewhere": (_hdf5(_outside), "in other files than .*n.h5'"),
    "texts": (_hdf5(lambda file, _: file.create_dataset("dataset", (1, MLP.size), "S3")), "n.h5' says"),
}
"""Populations that were once read wrongly or refused without a sentence, and their error messages."""


@LIMITED
@pytest.mark.parametrize("kind", FAULTS)
def test_populations_that_claim_too_much_or_make_no_sense(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge.checkpoints.array_files.SPARE", 1 << 20)
    read, sentence = FAULTS[kind]
    refused: list[str] = []
    with bounded(refused):
        read(tmp_path)
    assert refused
    assert re.search(sentence, refused[0])


SHARDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another kind": (lambda columns: columns["label"].update(kind="text"), "'label' has an unknown kind"),
    "no kind": (lambda columns: columns.update(label=3), "'label' has an unknown kind"),
    "a text of numbers": (lambda columns: columns["seed"].update(value="3"), "not of kind 'int'"),
    "a large number": (lambda columns: columns["seed"].update(value=2**64), "not of kind 'int'"),
    "a missing text": (
        lambda columns: columns.update(label={"kind": "json", "value": 2, "distinct": []}),
        "of number 2",
    ),
    "missing texts": (lambda columns: columns["label"].update(distinct=["a"]), "has codes without values"),
    "missing values": (lambda columns: columns.update(new={"kind": "float"}), "has no values of kind 'float'"),
    "other values": (lambda columns: columns["accuracy"].update(kind="int"), "has no values of kind 'int'"),
    "no ids": (lambda columns: columns.pop("id"), "'id'"),
    "ids of texts": (
        lambda columns: columns.update(id={"kind": "float", "value": 1.0}),
        "lacks the id and step",
    ),
}
"""Changes of a shard's columns, and their error messages."""


@pytest.mark.parametrize("kind", SHARDS)
def test_columns_that_are_none(kind: str, tmp_path: Path) -> None:
    change, sentence = SHARDS[kind]
    document = _shard_document(tmp_path)
    change(document["__metadata__"]["columns"])
    with pytest.raises(ValueError, match=rf"s\.safetensors' cannot be read as a shard: .*{sentence}"):
        _shard(tmp_path, document)


def test_half_a_character_is_no_value_of_a_column(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", MLP)
    params = {spec.name: torch.zeros(1, *spec.shape) for spec in MLP.layout}
    for value in ("\ud800", ["\ud800"], {"\ud800": 1}):
        with pytest.raises(ValueError, match="column 'a' has a value that is not plain JSON"):
            store.append(params, [{"id": 0, "step": 0, "a": value}])
    with pytest.raises(ValueError, match="not plain JSON"):
        store.append(params, [{"id": 0, "step": 0, "\ud800": 1}])
    assert not len(store)
