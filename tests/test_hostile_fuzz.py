"""Files with random damage: each file is read, or refused in a sentence, within seconds and with bounded memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from damage import EXAMPLES, LIMITED, Kind, check_kind, damage_bytes
from folder_cases import SMALL_LLAMA

from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.formats.adapters import read_config
from regauge.checkpoints.location import MANIFEST
from regauge.checkpoints.outputs.ledger import require_own
from regauge.checkpoints.outputs.provenance import read_provenance, summarize
from regauge.checkpoints.writing import save
from regauge.core.symmetry import Symmetry
from regauge.hub import open_model
from regauge.merging.recipes.read_recipe import read_recipe
from regauge.storage import Store
from regauge.storage.architecture import Architecture

PARAMS = {"w": torch.ones(4, 3), "b": torch.zeros(4), "v": torch.ones(2, 4)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "signed"}).bind(PARAMS)


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


def _store_document(folder: Path) -> Any:
    Store.create(folder / "store", Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]}))
    document = json.loads((folder / "store" / MANIFEST).read_text())
    shutil.rmtree(folder / "store")
    return document


DOCUMENTS: dict[str, Kind] = {
    "safetensors": Kind(
        _safetensors,
        lambda folder: {
            "__metadata__": {"a": "b"},
            "w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]},
            "v": {"dtype": "F64", "shape": [2, 3], "data_offsets": [48, 96]},
        },
        "x.safetensors",
    ),
    "index": Kind(
        _index,
        lambda folder: {"metadata": {"total_size": 24}, "weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        "safetensors",
    ),
    "symmetry": Kind(_symmetry, lambda folder: json.loads(SYMMETRY.to_json())),
    "recipe": Kind(
        _recipe,
        lambda folder: {
            "merge_method": "ties",
            "base_model": str(folder / "m"),
            "dtype": "float32",
            "parameters": {"normalize": True},
            "chat_template": "auto",
            "tokenizer": {
                "source": "union",
                "pad_to_multiple_of": 8,
                "tokens": {
                    "<a>": {
                        "source": {"kind": "model_token", "model": str(folder / "n"), "token_id": 5},
                        "force": True,
                    },
                    "<b>": {"source": {"kind": "zero"}},
                },
            },
            "slices": [
                {
                    "sources": [
                        {"model": str(folder / "m"), "layer_range": [0, 2]},
                        {
                            "model": str(folder / "n"),
                            "layer_range": [0, 2],
                            "parameters": {"weight": 1, "density": [0.2, 0.5]},
                        },
                    ]
                }
            ],
        },
        "r.yml",
    ),
    "adapter": Kind(
        _adapter,
        lambda folder: {"peft_type": "LORA", "lora_alpha": 8, "r": 4, "alpha_pattern": {r".*q_proj": 4, "k": 2}},
        "adapter",
    ),
    "provenance": Kind(
        _provenance,
        lambda folder: {
            "regauge": "1",
            "command": "align",
            "settings": {},
            "inputs": [{"as": "a", "path": "b", "sha256": {"b": "0"}, "provenance": "0"}],
            "ancestors": {"0": {"regauge": "1", "command": "merge", "inputs": []}},
        },
        is_refused=False,
    ),
    "ledger": Kind(
        _ledger,
        lambda folder: {"format": "regauge.run", "inputs": {"a": 1}, "shards": {"x": [1, 2]}, "is_complete": False},
        "out.partial",
    ),
    "store": Kind(_store, _store_document, "store"),
}
"""Documents that contain networks, and documents about networks."""


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_changed_document_is_read_or_refused(kind: str, examples: int, tmp_path: Path) -> None:
    check_kind(DOCUMENTS[kind], tmp_path, examples)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_file_with_other_bytes_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    path = tmp_path / name
    save(PARAMS, path) if name.endswith("safetensors") else torch.save(PARAMS, path)
    assert load(path).keys() == PARAMS.keys()

    refused = damage_bytes(load, path, examples)
    assert all(name in told for told in refused)


def _config(folder: Path, document: Any) -> Any:
    (folder / "model" / "config.json").write_text(json.dumps(document))
    model = open_model(folder / "model", values="never")
    return model.module, model.inputs, model.kwargs


def _config_document(folder: Path) -> Any:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL_LLAMA)).save_pretrained(folder / "model")
    return json.loads((folder / "model" / "config.json").read_text())


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_changed_configuration_builds_a_model_or_is_refused(examples: int, tmp_path: Path) -> None:
    check_kind(Kind(_config, _config_document, "model", use=lambda model: str(model[0])), tmp_path, examples)
