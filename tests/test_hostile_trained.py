"""Files of trained nets, data, tables and pages with random damage: each is read, or refused in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import EXAMPLES, LIMITED, Kind, check_kind

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.core.symmetry import Symmetry
from regauge.flow import Config, Flow, Perceptron, fit, load_flow, save_flow
from regauge.inr import Inr, load_inr, save_inr
from regauge.learn.autoencoder import Autoencoder
from regauge.learn.learned_matching import LearnedMatching
from regauge.learn.predictor import CONSTANT, NET, Predictor
from regauge.learn.targets import Target
from regauge.storage.checkpoints.alignments import Alignment, load_alignment, save_alignment
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import save
from regauge.weightspace.decoder import MLPDecoder
from regauge.weightspace.files import load_net, save_net

PARAMS = {"w": torch.ones(4, 3), "b": torch.zeros(4), "v": torch.ones(2, 4)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "signed"}).bind(PARAMS)
POPULATION = {n: torch.randn(40, *t.shape, generator=torch.Generator().manual_seed(0)) for n, t in PARAMS.items()}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _metanet(head: Any, layer: Any = None) -> ws.Metanet:
    return ws.Metanet(SYMMETRY, layer=layer, head=head, width=8, depth=1, generator=_generator())


def _save_net(path: Path) -> None:
    save_net(_metanet(ws.Invariant(1)), path, about={"a": 1})


def _save_matcher(path: Path) -> None:
    LearnedMatching(_metanet(ws.UnitFeatures(4))).save(path)


def _save_predictor(path: Path) -> None:
    about = {"scores": {NET: {"accuracy": 0.9}, CONSTANT: {"accuracy": 0.5}}}
    Predictor(_metanet(ws.Invariant(2)), Target("x", "classes", ("a", "b")), about).save(path)


def _save_autoencoder(path: Path) -> None:
    settings = MLPDecoder((4,))
    Autoencoder(_metanet(ws.Invariant(3)), settings.build(SYMMETRY, 3, _generator()), settings, {}, {}).save(path)


def _save_flow(path: Path, **config: Any) -> None:
    save_flow(fit(POPULATION, SYMMETRY, Config(epochs=1, **config), generator=_generator()), path)


def _save_plain_flow(path: Path) -> None:
    _save_flow(path, net=Perceptron(8, 1), is_aligned=True)


def _save_alignment(path: Path) -> None:
    save_alignment(Alignment(SYMMETRY, SYMMETRY.random(_generator())), path)


def _save_inr(path: Path) -> None:
    inr = Inr(in_features=2, width=4, depth=2)
    save_inr(inr.start(_generator()), inr, path)


def _document(make: Callable[[Path], None]) -> Callable[[Path], Any]:
    """The strings of a file's header, those of JSON as they are read."""

    def right(folder: Path) -> Any:
        make(folder / "right.safetensors")
        with Checkpoint.open(folder / "right.safetensors") as checkpoint:
            return {name: json.loads(text) if text[0] == "{" else text for name, text in checkpoint.header.items()}

    return right


def _reader(load: Callable[[Path], Any]) -> Callable[[Path, Any], Any]:
    """Writes the tensors of the right file with another header, and reads what is there."""

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
"""Files of trained nets and of what is found by them, with other headers."""


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", TRAINED)
def test_a_changed_header_is_read_or_refused(kind: str, examples: int, tmp_path: Path) -> None:
    check_kind(TRAINED[kind], tmp_path, examples)
