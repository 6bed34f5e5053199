"""Faults during the training of nets: kills, full disks, damaged states, and folders without write permission."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from apart import run_apart

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.cli.training_output import only_writer
from regauge.nets.siren import Siren
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.storage.collection import Collection

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SMALL = ["--width", "6", "--depth", "1", "--batch", "16", "--layer", "message_passing"]
COMMANDS = {
    "predictor": [
        *("learn", "predictor", "zoo", "--target", "size", "--epochs", "2", *SMALL),
        *("--dropout", "0.3", "--statistics", "no"),
    ],
    "autoencoder": [
        *("learn", "autoencoder", "zoo", "--inputs", "grid:3x3", "--epochs", "2", *SMALL),
        *("--latent", "3", "--decoder-widths", "6", "--dropout", "0.3"),
    ],
    "matching": [
        *("learn", "matching", "zoo", "--epochs", "4", *SMALL),
        *("--vectors", "4", "--checked", "2"),
    ],
    "flow": [
        *("flow", "fit", "zoo", "--epochs", "3", "--width", "6", "--depth", "1", "--batch", "16"),
        *("--net", "perceptron", "--aligned"),
    ],
}
"""Every command that trains a net on a store, with settings for little work."""
EVERY_COMMAND = pytest.mark.parametrize("command", list(COMMANDS))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of small sine networks."""
    folder = tmp_path_factory.mktemp("stores")
    architecture = Architecture("SIREN", "regauge.nets.siren:Siren", {"width": 4, "depth": 1, "omega": 3.0})
    store = Store.create(folder / "zoo", architecture, rg.discover(architecture.module(), (torch.randn(5, 2),)))
    chance = torch.Generator().manual_seed(1)
    module = Siren(2, 4, 1, depth=1, omega=3.0, generator=torch.Generator().manual_seed(0))
    networks = {name: torch.randn(60, *t.shape, generator=chance) for name, t in module.state_dict().items()}
    sizes = networks["layers.1.weight"].flatten(1).norm(dim=1).tolist()
    store.append(networks, [{"id": k, "step": 0, "size": size} for k, size in enumerate(sizes)])
    return folder


@pytest.fixture
def place(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new current folder with the store. A state is saved after every step, and pictures of reports are empty."""
    for drawing in ("savefig", "draw_without_rendering"):
        monkeypatch.setattr(f"matplotlib.figure.Figure.{drawing}", lambda *args, **options: None)
    (tmp_path / "zoo").symlink_to(stores / "zoo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regauge.checkpoints.state_file.SECONDS", 0.0)
    return tmp_path


@pytest.fixture(scope="module")
def whole(stores: Path) -> Callable[[str], Path]:
    """Return the output of each command without an interruption. Each command runs once."""

    def run(command: str) -> Path:
        made = stores / f"{command}.safetensors"
        if not made.exists():
            before = Path.cwd()
            os.chdir(stores)
            try:
                main([*COMMANDS[command], "-o", made.name])
            finally:
                os.chdir(before)
        return made

    return run


def is_same(left: Path, right: Path) -> bool:
    """Return whether two files contain the same net."""
    one, other = load(left), load(right)
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def interrupted(place: Path, request: pytest.FixtureRequest) -> Path:
    """Return the state of a training that was killed halfway."""
    code, errors, _ = run_apart([*COMMANDS[request.param], "-o", "out.safetensors"], then="kill", at=14)
    assert code == -signal.SIGKILL, errors
    assert "out.safetensors" not in names_in(place)
    (place / ".out.safetensors.lock").unlink()
    return place / "out.partial.safetensors"


EVERY_INTERRUPTED = pytest.mark.parametrize(
    ("command", "interrupted"), [(name, name) for name in COMMANDS], indirect=["interrupted"]
)


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.thorough)])
@EVERY_COMMAND
def test_a_kill_at_any_moment_changes_nothing(
    command: str, parts: int, place: Path, whole: Callable[[str], Path]
) -> None:
    """The kill may come before any change of files. Afterwards, the training continues from its last state.

    All commands write locks, states and outputs in the same way. Therefore the first changes are tested in the training
    of a predictor, and the changes of other commands before the first state, halfway and at the end.
    """
    arguments = [*COMMANDS[command], "-o", "out.safetensors"]
    code, errors, total = run_apart(arguments)
    assert code == 0, errors
    made = names_in(place)
    assert is_same(place / "out.safetensors", whole(command))
    assert total > 30
    begun = (1, 3, 8) if command == "predictor" or parts > 2 else (3,)
    for change in (*begun, *range(8 + (total - 8) // parts, total - 2, (total - 8) // parts), total):
        for name in made - {"zoo"}:
            (place / name).unlink()
        assert run_apart(arguments, then="kill", at=change)[0] == -signal.SIGKILL
        state, out = place / "out.partial.safetensors", place / "out.safetensors"
        assert not out.exists() or is_same(out, whole(command))
        if state.exists() or not out.exists():
            main([*arguments, "--resume"])
            assert names_in(place) == made, change
        assert is_same(out, whole(command))


@EVERY_COMMAND
def test_a_training_that_is_killed_again_and_again_ends(
    command: str, place: Path, whole: Callable[[str], Path]
) -> None:
    arguments, runs = [*COMMANDS[command], "-o", "out.safetensors", "--resume"], 0
    while (code := run_apart(arguments, then="kill", at=17)[0]) != 0:
        assert code == -signal.SIGKILL
        runs += 1
        assert runs < 9
    assert runs > 1
    assert is_same(place / "out.safetensors", whole(command))


@EVERY_INTERRUPTED
def test_a_full_disk_leaves_the_last_state(
    command: str, interrupted: Path, place: Path, whole: Callable[[str], Path]
) -> None:
    before, left = interrupted.read_bytes(), names_in(place)
    arguments = [*COMMANDS[command], "-o", "out.safetensors", "--resume"]
    code, errors, _ = run_apart(arguments, most_bytes=len(before) // 2)
    assert code == 2
    assert "the disk is too full to write 'out.partial.safetensors'" in errors
    assert "Traceback" not in errors
    assert interrupted.read_bytes() == before
    assert {name for name in names_in(place) if not name.endswith((".lock", ".partial"))} <= left
    main(arguments)
    assert is_same(place / "out.safetensors", whole(command))


@EVERY_COMMAND
def test_a_folder_that_cannot_be_written_to_is_refused_at_once(command: str, place: Path) -> None:
    code, errors, _ = run_apart([*COMMANDS[command], "-o", "out.safetensors"], then="refuse")
    assert code == 2
    assert "nothing can be written to the folder '.' of the output (Read-only file system)" in errors
    assert "Traceback" not in errors
    assert names_in(place) == {"zoo"}


def cut(state: Path) -> None:
    os.truncate(state, state.stat().st_size // 2)


def empty(state: Path) -> None:
    state.write_bytes(b"")


def flip(state: Path, place: int = -10) -> None:
    data = bytearray(state.read_bytes())
    data[place] ^= 1
    state.write_bytes(data)


def flip_header(state: Path) -> None:
    flip(state, state.read_bytes().index(b"best_epoch") + 14)


@pytest.mark.parametrize("damage", [cut, empty, flip, flip_header])
@EVERY_INTERRUPTED
def test_a_damaged_state_is_refused_and_begun_anew(
    command: str,
    interrupted: Path,
    damage: Callable[[Path], None],
    place: Path,
    whole: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(interrupted)
    before = interrupted.read_bytes()
    arguments = [*COMMANDS[command], "-o", "out.safetensors"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--resume"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "the interrupted training in 'out.partial.safetensors' is damaged" in told
    assert "delete it, or start again with --overwrite" in told
    assert interrupted.read_bytes() == before
    if damage in (cut, flip):
        main([*arguments, "--overwrite"])
        assert is_same(place / "out.safetensors", whole(command))
        assert not interrupted.exists()


@EVERY_INTERRUPTED
def test_what_another_training_left_is_not_continued(
    command: str, interrupted: Path, place: Path, refused: Callable[..., str]
) -> None:
    arguments = [*COMMANDS[command], "-o", "out.safetensors"]
    before = interrupted.read_bytes()
    assert "add --resume to continue it, or --overwrite" in refused(*arguments)
    assert "had other settings or networks (settings)" in refused(*arguments, "--resume", "--lr", "0.1")
    store = Store.open(place / "zoo")
    networks, rows = store.read(slice(None)), store.rows.dicts()
    (place / "zoo").unlink()
    other = Store.create(place / "zoo", store.architecture, store.symmetry)
    other.append(networks, rows)
    assert "had other settings or networks (networks" in refused(*arguments, "--resume")
    assert interrupted.read_bytes() == before


@EVERY_COMMAND
def test_files_that_are_no_states_stay(command: str, place: Path, refused: Callable[..., str]) -> None:
    mine = save({"w": torch.ones(3)}, place / "out.partial.safetensors")
    before = mine.read_bytes()
    arguments = [*COMMANDS[command], "-o", "out.safetensors"]
    assert "not the state of a training" in refused(*arguments, "--resume")
    assert "training, but is no such file; move it away" in refused(*arguments, "--overwrite")
    assert "name of an interrupted training" in refused(*COMMANDS[command], "-o", mine.name, "--overwrite")
    assert mine.read_bytes() == before


@EVERY_COMMAND
def test_two_processes_do_not_make_one_output(command: str, place: Path, refused: Callable[..., str]) -> None:
    arguments = [*COMMANDS[command], "-o", "out.safetensors"]
    with only_writer(place / "out.safetensors"):
        assert "another process is writing 'out.safetensors'" in refused(*arguments)
    main(arguments)
    assert not list(place.glob(".*lock"))


def test_networks_in_memory_are_told_apart_by_their_values() -> None:
    networks = {"w": torch.zeros(4, 3)}
    other = {"w": torch.zeros(4, 3).index_fill(0, torch.tensor([2]), 1.0)}
    assert Collection(networks).key != Collection(other).key
    assert Collection(networks).key == Collection({"w": torch.zeros(4, 3)}).key
