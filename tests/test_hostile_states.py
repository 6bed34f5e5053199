"""States of interrupted work with random damage: work continues from each state, or refuses it in a sentence and keeps
the file.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import LIMITED, Kind, check_kind, damage_bytes
from torch import Tensor, nn

from regauge.alignment.streamed.state import load_state
from regauge.checkpoints import state_file
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.state_file import StateFile
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.symmetry import Symmetry
from regauge.learn.course import Validation
from regauge.learn.training import train as train_on_networks
from regauge.nets.classification import ClassifierConfig, initialize, train
from regauge.storage.loader import Loader
from regauge.training.training_configs import NetTrainingConfig

EXAMPLES = [pytest.param(10), pytest.param(300, marks=pytest.mark.thorough)]
"""The number of states that are tried."""
PARAMS = {"w": torch.ones(4, 3), "b": torch.zeros(4), "v": torch.ones(2, 4)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "signed"}).bind(PARAMS)
NETWORKS = {n: torch.randn(12, *t.shape, generator=torch.Generator().manual_seed(0)) for n, t in PARAMS.items()}
STATE = "state.safetensors"


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a state after every step."""
    monkeypatch.setattr(state_file, "SECONDS", -1.0)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _classifier(path: Path, *, stops: bool = False) -> None:
    """Train a classifier, which a user may interrupt after an epoch."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    images, labels = torch.randn(8, 3, generator=_seeded(0)), torch.randint(2, (8,), generator=_seeded(1))
    progress = _stopping(3) if stops else _stopping(10**9)
    config = ClassifierConfig(epochs=4, batch=4)
    train(
        module,
        initialize(module, _seeded(2)),
        images,
        labels,
        config,
        generator=_seeded(3),
        state=path,
        progress=progress,
    )


def _net(path: Path, *, stops: bool = False) -> None:
    """Train a net over networks."""
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=_seeded(4)))
    losses = iter(range(5))

    def loss(batch: Any, generator: torch.Generator) -> Tensor:
        if stops and next(losses) == 4:
            raise Stop
        found: Tensor = net(batch.params["b"]).square().mean()
        return found

    loader = Loader(NETWORKS, batch=4, generator=_seeded(5))
    config = NetTrainingConfig(epochs=3, batch=4, average=0.5)
    train_on_networks(net, loader, loss, lambda: Validation((1.0,), {"a": 1.0}), config, seed=0, state=path)


def _stopping(after: int) -> Any:
    def progress(label: str, total: float | None) -> Any:
        taken = 0

        def advance(amount: float = 1, /, **others: Any) -> None:
            nonlocal taken
            taken += 1
            if taken > after:
                raise Stop

        return advance

    return progress


WORK: dict[str, Callable[..., None]] = {"classifier": _classifier, "net over networks": _net}
"""Work that saves a state."""


def _interrupted(work: str, path: Path) -> bytes:
    """Return the state of interrupted work."""
    with pytest.raises(Stop):
        WORK[work](path, stops=True)
    return path.read_bytes()


def _continue(work: str, path: Path) -> None:
    """Continue from a copy of a state, because the file is written again. A refused state does not change."""
    before = path.read_bytes()
    try:
        WORK[work](path)
    except BaseException:
        assert path.read_bytes() == before
        raise
    finally:
        path.write_bytes(before)


def _known(work: str) -> Kind:
    """Return states with a correct checksum and wrong contents."""

    def right(folder: Path) -> Any:
        _interrupted(work, folder / "right.safetensors")
        with Checkpoint.open(folder / "right.safetensors") as file:
            return {name: json.loads(file.header[name]) for name in ("known", "inputs")}

    def read(folder: Path, document: Any) -> object:
        with Checkpoint.open(folder / "right.safetensors") as file:
            tensors = {n.removeprefix("own/"): t.clone() for n, t in file.params.items() if n.startswith("own/")}
            buffers = {n.removeprefix("buffer/"): t.clone() for n, t in file.params.items() if n.startswith("buffer/")}
            generator = torch.Generator()
            generator = generator if "generator" in file.params else None  # type: ignore[assignment]
            if generator is not None:
                generator.set_state(file.params["generator"])
        document = document if isinstance(document, dict) else {}
        known, inputs = (
            one if isinstance(one, dict) else {} for one in (document.get("known"), document.get("inputs"))
        )
        StateFile(folder / STATE, generator=generator, buffers=buffers).write(tensors, known, inputs)
        _continue(work, folder / STATE)
        return True

    return Kind(read, right, STATE)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("work", WORK)
def test_a_state_that_says_other_things_is_continued_or_refused(work: str, examples: int, tmp_path: Path) -> None:
    check_kind(_known(work), tmp_path, examples)


def test_a_state_of_more_seconds_than_a_number_holds_is_refused(tmp_path: Path) -> None:
    kind = _known("net over networks")
    document = kind.right(tmp_path)
    document["known"]["seconds"] = 10**400
    with pytest.raises(ValueError, match=rf"in .*{STATE}' is damaged \(ValueError: seconds of the training is 1000"):
        kind.read(tmp_path, document)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("work", WORK)
def test_a_state_with_other_bytes_is_refused_and_stays(work: str, examples: int, tmp_path: Path) -> None:
    path = tmp_path / STATE
    _interrupted(work, path)
    _continue(work, path)
    refused = damage_bytes(lambda path: _continue(work, path), path, examples)
    assert all(STATE in told for told in refused)


def _left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """Return a command for networks on the disk, and the state that it left when it was interrupted."""
    monkeypatch.setattr("regauge.checkpoints.job.FileJob.fits", False)
    monkeypatch.chdir(folder)
    for k, name in enumerate("ab"):
        save({n: t[k] for n, t in NETWORKS.items()}, f"{name}.safetensors")
    Path("s.json").write_text(SYMMETRY.to_json())
    arguments = ["align", "a.safetensors", "b.safetensors", "--symmetry", "s.json", "-o", "out.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr("regauge.checkpoints.alignments.Alignment.save", _stop)
        with pytest.raises(Stop):
            main(arguments)
    (kept,) = Path("out.safetensors.partial").glob("*progress.safetensors")
    return [*arguments, "--resume"], kept


def _stop(*args: Any, **kwargs: Any) -> None:
    raise Stop


def test_damaged_states_of_an_alignment_are_refused_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    arguments, kept = _left(tmp_path, monkeypatch)
    right = kept.read_bytes()
    for damaged in (right[:-9], b"", right[:-3] + b"abc"):
        kept.write_bytes(damaged)
        there = sorted(kept.parent.rglob("*"))
        told = refused(*arguments)
        assert f"the interrupted streamed alignment in '{kept}' is damaged" in told
        assert sorted(kept.parent.rglob("*")) == there
        assert kept.read_bytes() == damaged
    kept.write_bytes(right)
    main(arguments)
    assert Path("out.safetensors").exists()


def _alignment_document(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        _, kept = _left(folder, patch)
        (folder / "right.safetensors").write_bytes(kept.read_bytes())
    with Checkpoint.open(folder / "right.safetensors") as file:
        return json.loads(file.header["known"])


def _alignment(folder: Path, document: Any) -> object:
    with Checkpoint.open(folder / "right.safetensors") as file:
        tensors = {name.removeprefix("own/"): tensor.clone() for name, tensor in file.params.items()}
    known = document if isinstance(document, dict) else {}
    StateFile(folder / STATE, work="streamed alignment").write(tensors, known, {})
    return load_state(folder / STATE, SYMMETRY)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_state_of_an_alignment_that_says_other_things_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    check_kind(Kind(_alignment, _alignment_document, STATE), tmp_path, examples)


def test_elements_of_other_shapes_are_no_state_of_an_alignment(tmp_path: Path) -> None:
    document = _alignment_document(tmp_path)
    assert _alignment(tmp_path, document)
    other = Symmetry.from_axes({"w": ("h", None), "b": ("h",)}, kinds={"h": "permutation"})
    for symmetry in (other.bind({"w": torch.ones(5, 3), "b": torch.zeros(5)}), other.bind(PARAMS)):
        with pytest.raises(ValueError, match=rf"in .*{STATE}' is damaged \(ValueError: the values of group 'h'"):
            load_state(tmp_path / STATE, symmetry)
