"""Pages of results with their numbers, including names that are wider than the screen of a phone."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge import Symmetry
from regauge.comparison import find_tensor_map
from regauge.core.groups import Frozen
from regauge.report.autoencoder_page import autoencoder_page
from regauge.report.comparison_page import comparison_page, lineage_page, tensor_map_page
from regauge.report.flow_page import GOOD, NEW, flow_page
from regauge.report.gauge_page import gauge_page
from regauge.report.predictor_page import predictor_page
from regauge.report.prune_page import prune_page
from regauge.report.symmetry_page import symmetry_page

LONG = [f"experiments/a-long-name-of-a-network-{k}.safetensors" for k in range(3)]
EPOCHS = [{"epoch": k, "seconds": 1.0, "loss": 1.0 / (k + 1), "validation_loss": 1.2 / (k + 1)} for k in range(3)]
GAUGED = {
    "checkpoint": "a.safetensors", "method": "hadamard", "seed": 0, "regauge": "1", "ones": ["n"], "notes": ["note"],
    "certificate": {"exact": 1e-9, "tolerance": 1e-6, "stored": 0.1, "dtype": "float32", "per_group": {"h": 1e-9}},
    "rotated": [{"group": "h", "kind": "orthogonal", "size": 4, "copies": 1}],
    "trials": {"measure": "loss", "judged": {"as is": 1.0}, "whole": 1.0, "values": {"as is": 1.0}, "kept": "as is"},
    "totals": [{"rounding": "4 bits", "before": 0.1, "after": 0.2}],
    "fixed": [{"name": "h", "reason": "softmax"}],
    "layers": [
        {
            "layer": "up",
            "ranges": {"before": [1.0, 2.0], "after": [1.0, 1.5]},
            "errors": [{"rounding": "4 bits", "before": 0.1, "after": 0.2}],
        }
    ],
}  # fmt: skip
PRUNED = {
    "checkpoint": "a.safetensors", "criterion": "output", "share": 0.5, "seed": 0, "regauge": "1",
    "values": {"before": 9, "after": 5},
    "certificate": {"ok": True, "given": 0.1, "exact": 1e-9, "tolerance": 1e-6, "cut": 1e-9},
    "groups": [{"group": "h", "before": 4, "after": 2}],
    "exact": {"dead units": ["h 0"]},
    "losses": {"given": {"loss": 1.0}, "at the end": {"loss": 2.0}},
    "config": {"hidden_size": {"before": 4, "after": 2}},
    "data": ["a.npz", "b.npz"],
    "fixed": [{"name": "o", "reason": "softmax"}],
}  # fmt: skip
DRAWN = {
    "scores": [
        {"name": kind, "networks": 9} | dict.fromkeys((*GOOD, *NEW), 0.123)
        for kind in ("generated", "held-out", "normal, each value by itself")
    ],
    "losses": {kind: [0.5, 1.5] for kind in ("generated", "held-out")},
    "places": {kind: [[0.0, 1.0], [1.0, 0.0]] for kind in ("training", "held-out", "generated")},
    "networks": {"train": 1, "validation": 1, "test": 1},
    "verdict": ["The sampled networks work.", "They are new."], "is_working": True, "is_copier": False, "share": 0.3,
    "reliability": {}, "history": [], "version": "1", "seed": 0, "settings": f"Config(head={'x' * 50})",
    "samples": "a", "flow": "b", "store": "c",
}  # fmt: skip
PREDICTED = {
    "scores": {name: {"R2": 0.5, "tau": 0.4} for name in ("net", "the same for all")},
    "target": {"name": "loss", "kind": "numbers", "classes": []},
    "tested": {"measured": [0.1, 0.2], "predicted": [0.1, 0.3]},
    "verdict": "The predictor is better.", "is_informed": True, "parts": ["permutation"], "parameters": 9,
    "networks": {"train": 1, "validation": 1, "test": 1},
    "history": [], "version": "1", "seed": 0, "settings": "Config()", "store": "c",
}  # fmt: skip
ENCODED = {
    "parts": ["permutation", "sign"], "latent": 8, "loss": "squared error", "version": "1", "seed": 0, "store": LONG[0],
    "networks": {"train": 1, "validation": 1, "test": 2}, "parameters": {"encoder": 9, "decoder": 9},
    "scores": {name: {"squared error": 0.5, "R2": 0.4} for name in ("autoencoder", "the same for all")},
    "latents": {"points": [[0.0, 1.0], [1.0, 0.0]], "labels": ["a", "b"], "share": 0.5, "column": "label"},
    "outputs": {"originals": [0.1, 0.2], "decoded": [0.1, 0.3]}, "pictures": None,
    "history": EPOCHS, "best": 2, "ended": "epochs", "settings": "Config()",
}  # fmt: skip
COMPARED = {
    "a": LONG[0], "b": LONG[1], "verdict": "descended", "reason": "B explains A", "numbers": {"distance": 0.5},
    "layers": [{"layer": LONG[2], "before": 0.1, "after": 0.9}], "tested_groups": ["h"], "draws": 1000,
    "notes": ["a note"], "tensors": [{"tensor": LONG[2], "size": 9, "before": 0.1, "after": 0.9}],
    "version": "1", "seed": 0,
}  # fmt: skip
PAIRED = {"verdict": "descended", "distance": 0.5, "explained": 0.5, "p-value": 0.001, "compared": 0.9}
RELATED = {
    "pairs": [{"a": a, "b": b} | PAIRED for a in LONG for b in LONG],
    "averages": [{"child": LONG[0], "parents": LONG[1:], "weights": [0.5, 0.5], "is_told": True}],
    "trees": [[{"parent": LONG[0], "child": name, "length": 1.0} for name in LONG[1:]]],
    "names": [LONG], "families": [LONG], "left_out": [], "version": "1", "seed": 0,
}  # fmt: skip
PAGES: dict[str, tuple[Callable[[str | Path], str], dict[str, Any]]] = {
    "gauge": (gauge_page, GAUGED),
    "prune": (prune_page, PRUNED),
    "flow": (flow_page, DRAWN),
    "predictor": (predictor_page, PREDICTED),
    "autoencoder": (autoencoder_page, ENCODED),
}
"""Pages with the numbers that they show."""


def many_groups(count: int) -> Symmetry:
    """Return a chain of layers with a group between any two layers, a stream along all layers, and frozen ends."""
    layers = {f"blocks.{k}.{LONG[0]}" if k == 1 else f"blocks.{k}": k for k in range(count)}
    axes = {
        f"{layer}.weight": (f"h{k + 1}" if k < count - 1 else None, f"h{k}" if k else None)
        for layer, k in layers.items()
    }
    streamed = {f"{layer}.bias": ("stream",) for layer in layers}
    found = Symmetry.from_axes({**axes, **streamed}, kinds={"stream": "orthogonal"})
    found = found.bind(
        {name: torch.zeros(4, 4) if name.endswith("weight") else torch.zeros(6) for name in {**axes, **streamed}}
    )
    first, *_, last = layers
    frozen = (
        Frozen(f"{first}.weight", 1, 4, "tied to an input"),
        Frozen(f"{last}.weight", 0, 4, "output of the model"),
    )
    return replace(found, frozen=frozen)


def _mapped() -> dict[str, Any]:
    """Return the facts about two implementations of a network, with a long name and a tensor that A lacks."""
    chance = torch.Generator().manual_seed(0)
    a = {f"layers.{k}.{LONG[0]}": torch.randn(8, 4, generator=chance) for k in range(3)}
    b = {f"{k}.packed": one.T for k, one in enumerate(a.values())} | {"new": torch.randn(4, 4, generator=chance)}
    found = find_tensor_map(a, b)
    return {**found.facts, "rows": found.rows, "notes": found.notes, "a": "a.pt", "b": LONG[0], "version": "0"}


def make_pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Return every page except the page of the demo, with the name of its template."""
    for name, (make, numbers) in PAGES.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(numbers))
        yield name, make(path)
    yield "comparison", comparison_page(COMPARED)
    yield "symmetry", symmetry_page(many_groups(12), LONG[0])
    yield "lineage", lineage_page(RELATED, {"3": np.ones((3, 3))})
    yield "tensor_map", tensor_map_page(_mapped())
