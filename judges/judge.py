"""A judge: the cases of a peer, run one after the other, and a record of what passed.

A judge is a script that names its peer, the commit of the peer's checkout, the packages that the peer needs, and a
function that yields its cases. Checkouts lie in the folder that the variable `PEERS` names; packages are installed
beside them, into `PEERS/.packages/PEER`, and never into the environment of regauge. Without a checkout the judge says
what is missing and is skipped. Cases that a record has already are not run again.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

HERE = Path(__file__).parent
RECORDS = HERE / "records"


class Failed(Exception):
    """A case that did not pass, with the reason as a sentence."""


class NotRun(Exception):
    """A case that needs something that this machine lacks, with the reason as a sentence."""


@contextmanager
def absent(names: Iterable[str], make: Callable[[str], object] = lambda name: MagicMock()) -> Iterator[None]:
    """Stand-ins for modules that a peer imports, and needs for training, records or plots only.

    Args:
        names: The modules; those that are imported already stay.
        make: What an attribute of a stand-in is, by its name.
    """

    class Stub(ModuleType):
        __path__: tuple[str, ...] = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return make(name)

    made = {}
    for name in names:
        if name not in sys.modules:
            made[name] = Stub(name)
            made[name].__spec__ = ModuleSpec(name, None)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


@dataclass(frozen=True)
class Peer:
    """A peer and what its cases need.

    Attributes:
        name: The name of its folder in `PEERS` and of its record.
        source: Where it is cloned from.
        commit: The commit of its checkout.
        packages: Requirements that are installed without their dependencies.
        needs: Modules of the environment of regauge that its cases import.
    """

    name: str
    source: str
    commit: str
    packages: tuple[str, ...]
    needs: tuple[str, ...] = ()

    def open(self) -> Path | str:
        """The checkout, with the packages importable; or a sentence about what is missing."""
        root = os.environ.get("PEERS")
        if not root:
            return f"{self.name} is skipped: set PEERS to a folder with a checkout of {self.source}"
        checkout = Path(root).resolve() / self.name
        if not checkout.is_dir():
            return f"{self.name} is skipped: {checkout} is not there; clone {self.source} and check out {self.commit}"
        head = _run(["git", "-C", str(checkout), "rev-parse", "HEAD"])
        if head != self.commit:
            return f"{self.name} is skipped: {checkout} is at {head}; check out {self.commit}"
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                return f"{self.name} is skipped: its cases need {module}, which the environment of regauge lacks"
        place = Path(root).resolve() / ".packages" / self.name
        done, wanted = place / ".installed", "\n".join(self.packages)
        if self.packages and (not done.is_file() or done.read_text() != wanted):
            shutil.rmtree(place, ignore_errors=True)
            pip = [sys.executable if importlib.util.find_spec("pip") else "python3", "-m", "pip"]
            command = [*pip, "install", "-q", "--no-deps", "--disable-pip-version-check", "--target", str(place)]
            _run([*command, *self.packages])
            done.write_text(wanted)
        # A judge has the name of its peer, and stands in the way of the import of the peer.
        sys.path[:] = [*(one for one in sys.path if Path(one or ".").resolve() != HERE), str(place)]
        return checkout


@dataclass(frozen=True)
class Case:
    """A case of a peer: its name, and what raises `Failed` where regauge does not do what the peer does."""

    name: str
    run: Callable[[], str | None]


@dataclass(frozen=True)
class Row:
    """A line of a record.

    Attributes:
        case: The name of the case.
        passed: None if the case needs something that the machine lacks.
        reason: Why the case did not pass or was not run. For a case that passed, what holds instead of equality.
        seconds: CPU time.
    """

    case: str
    passed: bool | None
    reason: str | None
    seconds: float


def judge(
    peer: Peer, cases: Callable[[Path], Iterable[Case]], explained: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run the cases that the record lacks, and append what became of them; `explained` says why cases do not pass."""
    checkout = peer.open()
    if isinstance(checkout, str):
        print(checkout)
        return
    warnings.simplefilter("ignore")
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{peer.name}.jsonl"
    known = {row.case for row in read_rows(path)}
    wanted = sys.argv[1:]
    for case in cases(checkout):
        if case.name in known or (wanted and not any(piece in case.name for piece in wanted)):
            continue
        start = time.process_time()
        with _silent():
            passed, reason = _try(case)
        if passed is False and case.name in explained:
            reason = f"{explained[case.name]} ({reason})"
        row = Row(case.name, passed, reason, round(time.process_time() - start, 2))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        state = "not run" if passed is None else "passed" if passed else "FAILED"
        print(f"{state}  {case.name}" + (f": {reason}" if reason else ""), flush=True)
    rows = [row for row in read_rows(path) if row.passed is not None]
    print(f"{peer.name}: {sum(bool(row.passed) for row in rows)} of {len(rows)} cases pass")


def declare_torchvision() -> None:
    """Declare the operators that torchvision looks for at its import, where its library for GPUs cannot be loaded.

    Its RegNets, which compute their widths with tensors, can then be built without values.
    """
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    blocks = importlib.import_module("torchvision.models.regnet").BlockParams
    blocks.from_init_params = partial(_on_cpu, blocks.from_init_params)


def _on_cpu(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.device("cpu"):
        return function(*args, **kwargs)


def read_rows(path: Path) -> list[Row]:
    """The rows of a record; none where there is no file."""
    if not path.is_file():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def sentence(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(/[\w.+-]+)+/", "", text)[:400]


def _try(case: Case) -> tuple[bool | None, str | None]:
    try:
        return True, case.run()
    except (Failed, NotRun) as error:
        return False if isinstance(error, Failed) else None, str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return False, f"{sentence(error)} ({Path(where.filename).name}, line {where.lineno})"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... failed: {done.stderr.strip()[-400:]}")
    return done.stdout.strip()


@contextmanager
def _silent() -> Iterator[None]:
    """Send what peers and commands print to nowhere."""
    sys.stdout.flush()
    with Path(os.devnull).open("w") as nowhere:
        kept = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = kept
