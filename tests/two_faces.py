"""Networks in files, and every measuring command next to its Python call."""

import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import structured
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.storage import Store
from regauge.storage.architecture import Architecture

NETS = """
import torch
import two_faces


def {name}():
    return two_faces.MODULES[{name!r}]()


def batches():
    return two_faces.batches({name!r}, 0)


def others():
    return two_faces.batches({name!r}, 1)
"""
EXAMPLES = 160
MEMBERS = 24
"""The number of networks in a store."""


def normed() -> nn.Module:
    first = (nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    second = (nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(32, 4)).eval()


def masked() -> nn.Module:
    return structured.made(torch.arange(12) % 3)


def halved() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)).half()


MODULES: dict[str, Callable[[], nn.Module]] = {"normed": normed, "masked": masked, "halved": halved}
SHAPES = {"normed": (1, 6, 6), "masked": (4,), "halved": (4,)}


def batches(name: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return examples of four classes that their inputs determine."""
    chance = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(3):
        x = torch.randn(EXAMPLES, *SHAPES[name], generator=chance)
        first, second = x.flatten(1).chunk(2, 1)
        y = (first.mean(1) > 0).long() + 2 * (second.mean(1) > 0).long()
        made.append((x, y))
    return made


def trained(name: str, seed: int) -> Params:
    """Return a network after a few training steps, with the statistics of its own activations."""
    torch.manual_seed(seed)
    module = MODULES[name]().float().train()
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    data = batches(name, 2)
    for step in range(60):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    dtype = next(MODULES[name]().parameters()).dtype
    state = {n: t.detach().to(dtype if t.is_floating_point() else t.dtype) for n, t in module.state_dict().items()}
    return rg.connect.reset_batchnorm(state, module.to(dtype), [x.to(dtype) for x, _ in data])


@cache
def discovered(name: str) -> rg.Symmetry:
    """Return the symmetry that Python finds, once for all functions. Every command finds it again."""
    module = MODULES[name]()
    return rg.discover(module, (torch.randn(2, *SHAPES[name], dtype=next(module.parameters()).dtype),))


@dataclass(frozen=True)
class Case:
    """A folder with networks a, b and c of one architecture, and the objects that Python needs for them."""

    name: str
    folder: Path

    @classmethod
    def make(cls, name: str, folder: Path) -> "Case":
        for seed, letter in enumerate("abc"):
            save(trained(name, seed), folder / f"{letter}.safetensors")
        (folder / "nets.py").write_text(NETS.format(name=name))
        return cls(name, folder)

    def params(self, letter: str) -> Params:
        return load(self.folder / f"{letter}.safetensors")

    @property
    def module(self) -> nn.Module:
        return MODULES[self.name]()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def symmetry(self) -> rg.Symmetry:
        return discovered(self.name)

    def task(self, seed: int, dtype: torch.dtype | None = None) -> rg.Task:
        dtype = dtype or self.dtype
        return rg.Task(self.module.to(dtype), [(x.to(dtype), y) for x, y in batches(self.name, seed)])

    def prepared(self, judging: rg.Task, choosing: rg.Task) -> rg.Task:
        """The task that recomputes statistics of batch normalization, if there are any, from the data for choices."""
        if not any(name.endswith("running_mean") for name in self.module.state_dict()):
            return judging
        prepare = partial(rg.connect.reset_batchnorm, module=self.module, batches=list(choosing.batches))
        return replace(judging, prepare=prepare)

    def run(self, *words: str) -> dict[str, Any]:
        """Return the JSON output of a command."""
        shown = StringIO()
        with redirect_stdout(shown):
            main([*words, "--json"])
        return json.loads(shown.getvalue())

    def options(self, *, data: bool = True) -> tuple[str, ...]:
        """Return the options of a command for the model, the data for choices and the data for evaluation."""
        shape = "x".join(map(str, (2, *SHAPES[self.name])))
        dtype = str(self.dtype).removeprefix("torch.")
        model = ("--model", f"nets.py:{self.name}", "--input-shape", shape, "--input-dtype", dtype)
        return (*model, "--data", "nets.py:batches", "--test", "nets.py:others") if data else model

    def judged(self) -> tuple[str, ...]:
        """Return these options for commands that trace nothing."""
        return ("--model", f"nets.py:{self.name}", "--data", "nets.py:batches", "--test", "nets.py:others")

    def tasks(self) -> tuple[rg.Task, rg.Task]:
        """Return the tasks for choices and for evaluation, as in commands. Statistics come from the data for
        choices.
        """
        choosing = self.task(0)
        return self.prepared(choosing, choosing), self.prepared(self.task(1), choosing)


Numbers = Mapping[str, Any]
Face = Callable[[Case], tuple[Numbers, Numbers]]


def align(case: Case) -> tuple[Numbers, Numbers]:
    said = case.run("align", "a.safetensors", "b.safetensors", "-o", "align.safetensors", *case.options())
    task, test = case.tasks()
    a, b = case.params("a"), case.params("b")
    result = rg.align(a, b, case.symmetry, task=task, generator=torch.Generator().manual_seed(0))
    halfway = [test.midpoint_loss(a, network) for network in (b, result.params)]
    (spans, losses) = said["gains"]
    return (
        {
            "written": load(case.folder / "align.safetensors"),
            "spans": [spans["before"], spans["after"]],
            "halfway": [losses["before"], losses["after"]],
            "objective": said["alignment"]["objective"],
        },
        {
            "written": result.params,
            "spans": [distance(a, one, case.symmetry.buffers) for one in (b, result.params)],
            "halfway": halfway,
            "objective": result.objective,
        },
    )


def merge(case: Case) -> tuple[Numbers, Numbers]:
    said = case.run("merge", "a.safetensors", "b.safetensors", "-o", "merge.safetensors", *case.options())["record"]
    task, test = case.tasks()
    networks, chance = [case.params("a"), case.params("b")], torch.Generator().manual_seed(0)
    result = rg.merge(networks, case.symmetry, task=task, test=test, generator=chance)
    names = ("before", "after", "metrics", "merged_metrics", "unaligned_metrics", "objective")
    return (
        {"written": load(case.folder / "merge.safetensors"), **{name: said[name] for name in names}},
        {"written": result.params, **{name: getattr(result.record, name) for name in names}},
    )


def line(case: Case) -> tuple[Numbers, Numbers]:
    said = case.run("line", "a.safetensors", "b.safetensors", "--points", "5", *case.judged())
    curve = rg.line(case.params("a"), case.params("b"), case.tasks()[1], points=5)
    names = ("table", "barrier", "raw_barrier", "auc", "stored")
    return {name: said[name] for name in names}, {name: getattr(curve, name) for name in names}


def plane(case: Case) -> tuple[Numbers, Numbers]:
    files = [f"{letter}.safetensors" for letter in "abc"]
    said = case.run("plane", *files, "--resolution", "3", "-o", "plane.svg", *case.judged())["table"][:3]
    found = rg.connect.plane(*map(case.params, "abc"), case.tasks()[1], resolution=3)
    return (
        {"points": [[row["x"], row["y"]] for row in said], "losses": [row["loss"] for row in said]},
        {"points": found.points.tolist(), "losses": found.at_points["loss"].tolist()},
    )


def compare(case: Case) -> tuple[Numbers, Numbers]:
    files, chance = ("a.safetensors", "b.safetensors"), torch.Generator().manual_seed(0)
    said = case.run("compare", *files, *case.options(), "-o", "said.html")
    found = rg.compare(*files, case.symmetry, task=case.tasks()[1], generator=chance, out="found.html")
    numbers = {name: value for name, value in found.numbers.items() if value is not None}
    said_page, page = (Path(name).read_text(encoding="utf-8") for name in ("said.html", "found.html"))
    return (
        {
            "verdict": said["verdict"],
            "numbers": {row["name"]: row["value"] for row in said["numbers"]},
            "page": said_page,
        },
        {"verdict": found.verdict, "numbers": numbers, "page": page},
    )


def compare_many(case: Case) -> tuple[Numbers, Numbers]:
    files = [f"{letter}.safetensors" for letter in "abc"]
    said = case.run("compare", *files, *case.options(data=False), "-o", "said_tree.html")
    rg.comparison.compare_files(files, symmetry=case.symmetry, out=rg.Output("tree.html"))
    pages = [Path(name).read_text(encoding="utf-8") for name in ("said_tree.html", "tree.html")]
    return {"written": said["written"], "page": pages[0]}, {"written": ["said_tree.html"], "page": pages[1]}


def gauge(case: Case) -> tuple[Numbers, Numbers]:
    said = case.run("gauge", "a.safetensors", "-o", "gauge.safetensors", *case.options())
    dtype = torch.float32
    chance = torch.Generator().manual_seed(0)
    tasks = {"task": case.task(0, dtype), "test": case.task(1, dtype)}
    result = rg.gauge(case.params("a"), case.symmetry, **tasks, generator=chance)
    assert result.trials is not None
    names = ("values", "kept", "whole", "judged")
    return (
        {"written": load(case.folder / "gauge.safetensors"), **{name: said["trials"][name] for name in names}},
        {"written": result.params, **{name: getattr(result.trials, name) for name in names}},
    )


def prune(case: Case) -> tuple[Numbers, Numbers]:
    said = case.run("prune", "a.safetensors", "-o", "prune.safetensors", "--share", "0.25", *case.options())
    facts = json.loads((case.folder / "prune.prune.json").read_text())
    result = rg.prune(
        case.params("a"),
        case.symmetry,
        share=0.25,
        task=case.task(0),
        test=case.task(1),
        generator=torch.Generator().manual_seed(0),
    )
    assert result.certificate is not None
    return (
        {
            "written": load(case.folder / "prune.safetensors"),
            "values": said["values"]["after"],
            "given": said["certificate"]["given"],
            "losses": facts["losses"],
            "kept": facts["kept"],
        },
        {
            "written": result.params,
            "values": result.values,
            "given": result.certificate.given,
            "losses": result.losses,
            "kept": {name: units.tolist() for name, units in result.kept.items()},
        },
    )


def canonicalize(case: Case) -> tuple[Numbers, Numbers]:
    case.run("canonicalize", "a.safetensors", "-o", "canonical.safetensors", *case.options(data=False))
    written = load(case.folder / "canonical.safetensors")
    return {"written": written}, {"written": rg.canonicalize(case.params("a"), case.symmetry)}


def repair(case: Case) -> tuple[Numbers, Numbers]:
    ends = ("--endpoints", "a.safetensors", "b.safetensors")
    save(rg.connect.interpolate(case.params("a"), case.params("b"), 0.5), case.folder / "mean.safetensors")
    said = case.run("repair", "mean.safetensors", "-o", "repaired.safetensors", *ends, *case.judged())
    task, test = case.tasks()
    merged, endpoints = case.params("mean"), [case.params("a"), case.params("b")]
    inputs = [x for x, _ in task.batches]
    result = rg.repair(merged, case.module, endpoints, inputs, task=task)
    networks = (merged, result.params, *endpoints)
    return (
        {
            "written": load(case.folder / "repaired.safetensors"),
            "networks": [{name: row[name] for name in ("loss", "accuracy")} for row in said["networks"]],
        },
        {"written": result.params, "networks": [test.evaluate(one) for one in networks]},
    )


def flow_judge(case: Case) -> tuple[Numbers, Numbers]:
    chance, center, symmetry = torch.Generator().manual_seed(0), case.params("a"), case.symmetry
    drawn = {n: t.expand(MEMBERS, *t.shape) for n, t in center.items()}
    for name, tensor in center.items():
        if tensor.is_floating_point() and name not in symmetry.structure:
            noise = 0.1 * torch.randn(MEMBERS, *tensor.shape, generator=chance)
            drawn[name] = (drawn[name] + noise.abs()).to(tensor.dtype)  # variances stay positive
    store = Store.create("zoo", Architecture(case.name, f"two_faces:{case.name}", {}), symmetry)
    store.append(drawn, [{"id": k, "step": 0} for k in range(MEMBERS)])
    small = ("--width", "8", "--depth", "1", "--epochs", "2", "--batch", "8")
    case.run("flow", "fit", "zoo", "-o", "flow.safetensors", *small)
    case.run("flow", "sample", "flow.safetensors", "--networks", "6", "--steps", "4", "-o", "new")
    said = case.run("flow", "judge", "flow.safetensors", "new", "zoo", "--data", "nets.py:batches", "-o", "page.html")
    store, samples = Store.open("zoo"), Store.open("new").read(slice(None))
    parts = rg.flow.divide(store)
    networks = [store.read(parts[part]) for part in ("train", "test")]
    chance = torch.Generator().manual_seed(0)
    found = rg.flow.judge(samples, *networks, symmetry, case.tasks()[0], generator=chance)
    labels = {"loss": "loss", "accuracy": "accuracy", "nearest": "distance", "copied": "copied", "spread": "spread"}
    return (
        {
            "verdict": said["verdict"],
            "scores": [{label: row[label] for label in ("name", *labels)} for row in said["scores"]],
        },
        {
            "verdict": list(found.verdict),
            "scores": [
                {"name": score.name, **{label: getattr(score, name) for label, name in labels.items()}}
                for score in found.scores
            ],
        },
    )


FACES: dict[str, Face] = {
    "align": align,
    "merge": merge,
    "line": line,
    "plane": plane,
    "compare": compare,
    "compare many": compare_many,
    "gauge": gauge,
    "prune": prune,
    "canonicalize": canonicalize,
    "repair": repair,
    "flow judge": flow_judge,
}
"""The output of a command, and the result of Python for the same files."""
