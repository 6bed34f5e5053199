"""Files of trained nets, data, tables and pages with random damage: each file is read, or refused in a sentence."""

import json
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import EXAMPLES, LIMITED, Kind, bounded, check_kind, damage_bytes
from page_cases import DRAWN, PAGES

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.checkpoints.alignments import Alignment, load_alignment
from regauge.checkpoints.array_files import read_arrays
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.core.escaping import UNSEEN
from regauge.core.symmetry import Symmetry
from regauge.flow import Config, Flow, Perceptron, fit, load_flow
from regauge.gauging import read_mappings
from regauge.inr import Inr, load_inr
from regauge.learn.autoencoder import Autoencoder
from regauge.learn.learned_matching import LearnedMatching
from regauge.learn.predictor import CONSTANT, NET, Predictor
from regauge.learn.targets import Target
from regauge.report.flow_page import flow_page
from regauge.weightspace.decoder import MLPDecoder
from regauge.weightspace.net_files import load_net

PARAMS = {"w": torch.ones(4, 3), "b": torch.zeros(4), "v": torch.ones(2, 4)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "signed"}).bind(PARAMS)
POPULATION = {n: torch.randn(40, *t.shape, generator=torch.Generator().manual_seed(0)) for n, t in PARAMS.items()}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _metanet(head: Any, layer: Any = None) -> ws.Metanet:
    return ws.Metanet(SYMMETRY, layer=layer, head=head, width=8, depth=1, generator=_generator())


def _save_net(path: Path) -> None:
    _metanet(ws.Invariant(1)).save(path, about={"a": 1})


def _save_matcher(path: Path) -> None:
    LearnedMatching(_metanet(ws.UnitFeatures(4))).save(path)


def _save_predictor(path: Path) -> None:
    about = {"scores": {NET: {"accuracy": 0.9}, CONSTANT: {"accuracy": 0.5}}}
    Predictor(_metanet(ws.Invariant(2)), Target("x", "classes", ("a", "b")), about).save(path)


def _save_autoencoder(path: Path) -> None:
    settings = MLPDecoder((4,))
    Autoencoder(_metanet(ws.Invariant(3)), settings.build(SYMMETRY, 3, _generator()), settings, {}, {}).save(path)


def _save_flow(path: Path, **config: Any) -> None:
    fit(POPULATION, SYMMETRY, Config(epochs=1, **config), generator=_generator()).save(path)


def _save_plain_flow(path: Path) -> None:
    _save_flow(path, net=Perceptron(8, 1), is_aligned=True)


def _save_alignment(path: Path) -> None:
    Alignment(SYMMETRY, SYMMETRY.random(_generator())).save(path)


def _save_inr(path: Path) -> None:
    inr = Inr(in_features=2, width=4, depth=2)
    inr.save(inr.start(_generator()), path)


def _document(make: Callable[[Path], None]) -> Callable[[Path], Any]:
    """Return the strings of a file's header, where JSON strings are parsed."""

    def right(folder: Path) -> Any:
        make(folder / "right.safetensors")
        with Checkpoint.open(folder / "right.safetensors") as checkpoint:
            return {name: json.loads(text) if text[0] == "{" else text for name, text in checkpoint.header.items()}

    return right


def _reader(load: Callable[[Path], Any]) -> Callable[[Path, Any], Any]:
    """Write the tensors of the valid file with another header, and read the result."""

    def read(folder: Path, document: Any) -> Any:
        with Checkpoint.open(folder / "right.safetensors") as checkpoint:
            params = checkpoint.params
        entries = document.items() if isinstance(document, dict) else ()
        metadata = {name: text if isinstance(text, str) else json.dumps(text) for name, text in entries}
        save(params, folder / "other.safetensors", overwrite=True, metadata=metadata)
        return load(folder / "other.safetensors")

    return read


def _trained(load: Callable[[Path], Any], make: Callable[[Path], None], use: Callable[[Any], object]) -> Kind:
    return Kind(_reader(load), _document(make), "other.safetensors", use=use)


def _align(matcher: LearnedMatching) -> None:
    a, b = ({name: tensor[k] for name, tensor in POPULATION.items()} for k in (0, 1))
    rg.align(a, b, SYMMETRY, method=matcher, generator=_generator())


def _sample(flow: Flow) -> None:
    flow.log_density(flow.sample(2, generator=_generator(), steps=2), steps=2)


TRAINED: dict[str, Kind] = {
    "net": _trained(load_net, _save_net, lambda found: found[0](POPULATION)),
    "matcher": _trained(learn.load_matching, _save_matcher, _align),
    "predictor": _trained(learn.load_predictor, _save_predictor, lambda found: found.predict(POPULATION)),
    "autoencoder": _trained(learn.load_autoencoder, _save_autoencoder, lambda found: found.canonicalize(POPULATION)),
    "flow": _trained(load_flow, _save_flow, _sample),
    "plain flow": _trained(load_flow, _save_plain_flow, _sample),
    "alignment": _trained(load_alignment, _save_alignment, lambda found: found.symmetry.act(found.element, PARAMS)),
    "inr": _trained(load_inr, _save_inr, lambda found: found[1].module(found[0])),
}
"""Files of trained nets and of their results, with other headers."""


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", TRAINED)
def test_a_changed_header_is_read_or_refused(kind: str, examples: int, tmp_path: Path) -> None:
    check_kind(TRAINED[kind], tmp_path, examples)


TABLE = [
    {"smooth_layer": "a.norm", "balance_layers": ["q_proj", "re:.*k_proj"]},
    [["re:.*up_proj"], "re:.*norm"],
    {"smooth_layer": "v", "balance_layers": "o"},
]


def _table(folder: Path, document: Any) -> object:
    (folder / "table.yml").write_text(json.dumps(document))
    return read_mappings(folder / "table.yml")


def _page(make: Callable[[str | Path], str], right: dict[str, Any]) -> Kind:
    def read(folder: Path, document: Any) -> str:
        (folder / "numbers.json").write_text(json.dumps(document))
        return make(folder / "numbers.json")

    return Kind(read, lambda folder: right, "numbers.json", use=str)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
def test_changed_tables_are_read_or_refused(examples: int, tmp_path: Path) -> None:
    check_kind(Kind(_table, lambda folder: TABLE, "table.yml"), tmp_path, examples)


@LIMITED
@pytest.mark.thorough
@pytest.mark.parametrize("name", PAGES)
def test_changed_numbers_of_pages_are_read_or_refused(name: str, tmp_path: Path) -> None:
    check_kind(_page(*PAGES[name]), tmp_path, 60)


HOSTILE = "<script>alert(1)</script>|\x1b[31m\u202e\u2028`a`"
"""A name that contains a tag, a table cell, a color and a reversal of the text direction."""


def _renamed(value: Any) -> Any:
    """Return a document whose texts end with a hostile name, with unchanged keys."""
    if isinstance(value, dict):
        return {key: _renamed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    return value + HOSTILE if isinstance(value, str) and value not in ("hadamard", "output", "numbers") else value


@pytest.mark.parametrize("name", PAGES)
def test_names_in_pages_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    make, right = PAGES[name]
    (tmp_path / "numbers.json").write_text(json.dumps(_renamed(right)))
    page = make(tmp_path / "numbers.json")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not UNSEEN.search(page.replace("\n", ""))


@pytest.mark.parametrize("kind", ["losses", "places"])
def test_texts_in_place_of_drawn_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    texts = {name: [["1", "\x1b[31m"]] for name in DRAWN[kind]}
    (tmp_path / "numbers.json").write_text(json.dumps(DRAWN | {kind: texts}))
    with pytest.raises(ValueError, match=r"numbers\.json' does not contain the numbers of this page"):
        flow_page(tmp_path / "numbers.json")


REPEATED = "- &a [x]\n" + "".join(
    f"- &{one} [{', '.join(['*' + before] * 9)}]\n" for before, one in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("&a [*a]", "refers to itself"),
        ("&a {mappings: *a}", "refers to itself"),
        ("[" * 5000, "is no YAML file"),
        (REPEATED, "has more than"),
        ('- {smooth_layer: a, balance_layers: [!!int "", b]}', "has a value that cannot be read"),
        ("- {smooth_layer: a, balance_layers: [!!timestamp foo]}", "has a value that cannot be read"),
        ("- [" + "9" * 5000 + "]", "has a value that cannot be read"),
        ("? {a: b}\n: c", "has a value that cannot be read"),
        ("x" * (1 << 21), "has more than"),
        ("\x00", "is no YAML file"),
        ('- {smooth_layer: "\\ud800"}', "contains an incomplete character"),
    ],
)
def test_hostile_tables(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "table.yml").write_text(text)
    with pytest.raises(ValueError, match=rf"table\.yml.*{sentence}"):
        read_mappings(tmp_path / "table.yml")


def _array_header(shape: tuple[int, ...]) -> bytes:
    """Return the header of an array with no values."""
    text = repr({"descr": "<f8", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@LIMITED
@pytest.mark.parametrize("shape", [(10**12,), (10**9, 10**9, 10**9), (2**62, 2**62, 0), (-5,), (10**400,)])
def test_arrays_that_are_larger_than_their_file(shape: tuple[int, ...], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("inputs.npy", _array_header(shape))
    refused: list[str] = []
    with bounded(refused):
        read_arrays(tmp_path / "d.npz")
    assert "d.npz" in refused[0]


def test_arrays_that_are_packed_tightly(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", _array_header((1 << 26,)) + bytes(8 << 26))
    with pytest.raises(ValueError, match=r"d\.npz.*would unpack to .*numpy\.savez"):
        read_arrays(tmp_path / "d.npz")
    np.savez_compressed(tmp_path / "e.npz", inputs=np.zeros(1 << 20))
    assert len(read_arrays(tmp_path / "e.npz")["inputs"]) == 1 << 20


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
def test_arrays_with_other_bytes_are_read_or_refused(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez_compressed(path, inputs=np.ones((5, 3), np.float32), targets=np.arange(5))

    assert read_arrays(path).keys() == {"inputs", "targets"}

    refused = damage_bytes(read_arrays, path, examples)
    assert all("d.npz" in told for told in refused)
