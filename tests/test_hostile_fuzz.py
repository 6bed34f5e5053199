"""Files with random damage: each is read, or refused in a sentence, within seconds and bounded memory."""

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regauge import weightspace as ws
from regauge.core.symmetry import Symmetry
from regauge.flow.files import load_flow
from regauge.merging.recipe_reading import read_recipe
from regauge.storage.architecture import Architecture
from regauge.storage.checkpoints.checkpoint import Checkpoint, load
from regauge.storage.checkpoints.formats.adapters import read_config
from regauge.storage.checkpoints.outputs.ledger import require_own
from regauge.storage.checkpoints.outputs.provenance import read_provenance, summarize
from regauge.storage.checkpoints.writing import save
from regauge.storage.store import Store
from regauge.storage.store.manifest import MANIFEST
from regauge.weightspace.files import describe_net, load_net, save_net

SECONDS, NBYTES = 10, 3 << 30
"""What one file may take."""
PARAMS = {"w": torch.ones(4, 3), "b": torch.zeros(4), "v": torch.ones(2, 4)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "signed"}).bind(PARAMS)
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**12, 10**400, 0.5, -0.0, 1e308, "", "w", "\x1b[31m", "(a|aa)+x", "../../x",
    "/dev/zero", [], [[]], {}, {"a": {}}, ["w"] * 50, [10**9, 10**9],
]  # fmt: skip
"""What takes the place of a value."""


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a document are."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _places(one, (*place, key))


def _changed(document: Any, places: list[int], values: list[Any]) -> Any:
    """A document with other values in some places."""
    document = json.loads(json.dumps(document))
    for number, value in zip(places, values, strict=True):
        found = list(_places(document))
        *above, last = found[number % len(found)] or ("",)
        if last == "":
            continue
        inner = document
        for key in above:
            inner = inner[key]
        if value == "remove" and isinstance(inner, dict):
            del inner[last]
        else:
            inner[last] = deepcopy(value)
    return document


@contextmanager
def _bounded() -> Iterator[None]:
    """Little memory above what is held, and little time; a refusal is a sentence."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + NBYTES, before[1]))
    begin = time.monotonic()
    try:
        yield
    except (ValueError, KeyError, OSError) as error:
        assert " " in str(error)  # noqa: PT017
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - begin < SECONDS


def _header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(96)


def _safetensors(folder: Path, document: Any) -> None:
    (folder / "x.safetensors").write_bytes(_header(document))
    load(folder / "x.safetensors")


def _index(folder: Path, document: Any) -> None:
    save({"w": torch.ones(3)}, folder / "a.safetensors", overwrite=True)
    save({"v": torch.ones(3)}, folder / "b.safetensors", overwrite=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    with Checkpoint.open(folder / "model.safetensors.index.json") as checkpoint:
        assert set(checkpoint) == set(document["weight_map"])


def _symmetry(folder: Path, document: Any) -> None:
    found = Symmetry.from_json(json.dumps(document)).bind(PARAMS)
    found.act(found.random(torch.Generator().manual_seed(0)), PARAMS)
    assert str(found)


def _recipe(folder: Path, document: Any) -> None:
    for name in ("m", "n"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "r.yml").write_text(json.dumps(document))
    read_recipe(folder / "r.yml")


def _adapter(folder: Path, document: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(document))
    read_config(folder).scale("model.layers.0.q_proj" + "a" * 40, 4)


def _provenance(folder: Path, document: Any) -> None:
    save({"w": torch.ones(3)}, folder / "p.safetensors", overwrite=True, metadata={"regauge": json.dumps(document)})
    found = read_provenance(folder / "p.safetensors")
    assert found is None or summarize(found)


def _ledger(folder: Path, document: Any) -> None:
    (folder / "out.partial").mkdir(exist_ok=True)
    (folder / "out.partial" / "run.json").write_text(json.dumps(document))
    require_own(folder / "out.partial")


def _store(folder: Path, document: Any) -> None:
    (folder / "store").mkdir(exist_ok=True)
    (folder / "store" / "shards").mkdir(parents=True, exist_ok=True)
    (folder / "store" / MANIFEST).write_text(json.dumps(document))
    Store.open(folder / "store")


def _made_net() -> ws.Metanet:
    return ws.Metanet(SYMMETRY, head=ws.Invariant(1), width=8, depth=1, generator=torch.Generator().manual_seed(0))


def _store_document(folder: Path) -> Any:
    Store.create(folder / "store", Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]}))
    document = json.loads((folder / "store" / MANIFEST).read_text())
    shutil.rmtree(folder / "store")
    return document


def _net(folder: Path, document: Any) -> None:
    path = save_net(_made_net(), folder / "net.safetensors", about={}, overwrite=True)
    with Checkpoint.open(path) as checkpoint:
        header, params = dict(checkpoint.header), checkpoint.params
    save(params, path, overwrite=True, metadata={**header, "net": json.dumps(document)})
    load_net(path)


def _flow(folder: Path, document: Any) -> None:
    metadata = {"kind": "regauge.flow", "flow": json.dumps(document), "about": json.dumps(document)}
    save({"w": torch.ones(3)}, folder / "flow.safetensors", overwrite=True, metadata=metadata)
    load_flow(folder / "flow.safetensors")


DOCUMENTS: dict[str, tuple[Callable[[Path, Any], None], Any]] = {
    "safetensors": (
        _safetensors,
        {
            "__metadata__": {"a": "b"},
            "w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]},
            "v": {"dtype": "F64", "shape": [2, 3], "data_offsets": [48, 96]},
        },
    ),
    "index": (_index, {"metadata": {"total_size": 24}, "weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}),
    "symmetry": (_symmetry, json.loads(SYMMETRY.to_json())),
    "recipe": (
        _recipe,
        {
            "merge_method": "ties",
            "base_model": "m",
            "dtype": "float32",
            "parameters": {"normalize": True},
            "slices": [
                {
                    "sources": [
                        {"model": "m", "layer_range": [0, 2]},
                        {"model": "n", "layer_range": [0, 2], "parameters": {"weight": 1, "density": [0.2, 0.5]}},
                    ]
                }
            ],
        },
    ),
    "adapter": (_adapter, {"peft_type": "LORA", "lora_alpha": 8, "r": 4, "alpha_pattern": {r".*q_proj": 4, "k": 2}}),
    "provenance": (
        _provenance,
        {
            "regauge": "1", "command": "align", "settings": {},
            "inputs": [{"as": "a", "path": "b", "sha256": {"b": "0"}, "provenance": "0"}],
            "ancestors": {"0": {"regauge": "1", "command": "merge", "inputs": []}},
        },
    ),
    "ledger": (_ledger, {"format": "regauge.run", "inputs": {"a": 1}, "shards": {"x": [1, 2]}, "is_complete": False}),
    "store": (_store, _store_document),
    "net": (_net, lambda folder: describe_net(_made_net())),
    "flow": (_flow, {"symmetry": json.loads(SYMMETRY.to_json()), "space": {}, "net": {"width": 8}}),
}  # fmt: skip
"""What reads a document, and one that is right."""
EXAMPLES = [pytest.param(40), pytest.param(2000, marks=pytest.mark.thorough)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux alone")
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_changed_document_is_read_or_refused(kind: str, examples: int, tmp_path: Path) -> None:
    read, right = DOCUMENTS[kind]
    document = right(tmp_path) if callable(right) else right

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(
        changes=st.lists(
            st.tuples(st.integers(0, 200), st.sampled_from([*ODD, "remove"]) | st.integers() | st.text(max_size=5)),
            max_size=3,
        )
    )
    def check(changes: list[tuple[int, Any]]) -> None:
        with _bounded():
            read(tmp_path, _changed(document, [place for place, _ in changes], [value for _, value in changes]))

    check()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux alone")
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_file_with_other_bytes_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    path = tmp_path / name
    save(PARAMS, path) if name.endswith("safetensors") else torch.save(PARAMS, path)
    content = path.read_bytes()

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(changes=st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6))
    def check(changes: list[tuple[int, int]]) -> None:
        damaged = bytearray(content)
        for place, value in changes:
            damaged[place] = value
        path.write_bytes(damaged)
        with _bounded():
            load(path)

    check()
