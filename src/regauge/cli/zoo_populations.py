"""`regauge zoo align`, `compare`, `map` and `nearest`: populations modulo their symmetry, by jobs or fingerprints."""

import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import regauge as rg
from regauge import learn
from regauge.checkpoints.array_files import SUFFIXES
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.outputs.ledger import PARTS, claim, remove_own, require_own
from regauge.cli.options import UsageError
from regauge.cli.output import LOSSES, require_pictures, show_progress, show_status, tell, tell_table, write_picture
from regauge.cli.zoo_options import Sampled, ZooAlign, ZooCompare, ZooMap, ZooNearest
from regauge.connect import prepare_statistics
from regauge.core.params import Params, count_models, select
from regauge.core.task import Batch
from regauge.hub import Loss, make_task, open_batches
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import (
    Barriers,
    Fingerprints,
    OrbitDistances,
    clusters,
    dask,
    flat_map,
    mean_barrier,
    plan_population,
    processes,
    run_jobs,
    sample,
    share_of,
    universe,
)
from regauge.zoo.jobs.compare_blocks import Compare, plan_comparison
from regauge.zoo.jobs.executors import MakeExecutor
from regauge.zoo.training.examples import SETS, load_examples

Indices = NDArray[np.int64]
SIZE = 32
"""Networks of a block of a matrix."""
EXACT = "donot_use_mm_for_euclid_dist"
"""The mode of `torch.cdist` without a product of matrices, which would cancel for networks that are near."""
_BY = {
    "orbits": "distance modulo the group",
    "universe": "distance, all aligned to one universe",
    "weights": "distance of weights as they are",
    "latent": "distance of latent vectors",
}
"""The words for the distance in the title of a map, by the option `--by`."""
GROUPS = 20
"""Most whole numbers of a column that are groups, with a color each, and no scale."""


class Matrices:
    """Matrices over all pairs of some networks for one command: with a bar, on processes or a cluster, and resumed.

    What is done already is kept in the folder `OUT.parts` until the command has written its output; the same command
    continues there. A folder of that name that regauge has not made is refused.
    """

    def __init__(self, options: ZooCompare | ZooMap, store: Store, chosen: Indices) -> None:
        self.store, self.executor = store, executor_of(options.on)
        settings = {name: value for name, value in asdict(options).items() if name not in ("output", "overwrite", "on")}
        files = [Path(value) for value in settings.values() if isinstance(value, str) and Path(value).is_file()]
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        what = json.dumps([repr(settings), store.key, store.places(chosen), states])
        self.what = hashlib.sha256(what.encode()).hexdigest()
        self.folder = options.output.with_name(f"{options.output.name}.parts")
        require_own(self.folder, PARTS)

    def __call__(self, label: str, params: Params, compare: Compare) -> Tensor:
        """The matrix of all pairs, float64 `[networks, networks]`; each of a command has another label."""
        claim(self.folder, PARTS)
        folder = self.folder / hashlib.sha256(f"{self.what} {label}".encode()).hexdigest()[:16]
        networks = Store.create(folder / "networks", self.store.architecture)
        count = count_models(params)
        if not networks.has("all"):
            networks.append(params, [{"id": k, "step": 0} for k in range(count)], name="all")
        jobs = plan_comparison(networks, folder / "blocks", range(count), compare, size=SIZE, what=self.what)
        with show_progress() as progress:
            run_jobs(jobs, executor=self.executor, progress=lambda _, total: progress(label, total))
        return torch.from_numpy(jobs.matrix())

    def clear(self) -> None:
        """Delete what is kept."""
        remove_own(self.folder, PARTS)


def align(options: ZooAlign) -> None:
    """Align what is missing of a store."""
    to = target_of(options.to)
    executor, share = executor_of(options.on), share_of()
    with show_status("finding the network that all are aligned to"):
        store, jobs = plan_population(options.store, options.output, to=to, count=options.sample, seed=options.seed)
    with show_progress() as progress:
        done = run_jobs(jobs, executor=executor, share=share, progress=progress)
    store.refresh()
    tell(f"written: {options.output}: {words(store)}; {done} of {len(jobs.keys)} shards were aligned now")
    left_out = len(Store.open(options.store)) - len(store)
    if not share.world > 1 and left_out:
        tell(f"{left_out} networks with NaN or Inf were left out")
    tell(f"aligned to: {jobs.reference}")


def compare(options: ZooCompare) -> None:
    """Measure barriers before and after alignment."""
    require_pictures(options.output, overwrite=options.overwrite)
    store, chosen, params = networks_of(options)
    symmetry = None if options.align == "no" else store.require_symmetry()
    task = task_on(store.architecture, options.data, options.loss, options.batch)
    matrix_of = Matrices(options, store, chosen)
    before = Barriers(task, points=options.points)
    matrices = {"as they are": matrix_of("barriers, as they are", params, before)}
    if options.align == "pairs":
        after = Barriers(task, symmetry, points=options.points, seed=options.seed)
        matrices["each pair aligned"] = matrix_of("barriers, aligned", params, after)
    elif symmetry is not None and options.align != "no":
        moved, name = together(params, symmetry, options, matrix_of)
        matrices[name] = matrix_of("barriers, aligned", moved, before)
    rows = store.rows.dicts(chosen)
    names = dict(zip(matrices, ("barrier", "barrier_aligned"), strict=False))
    pairs = [
        {f"{key}_{side}": rows[k][key] for side, k in (("a", i), ("b", j)) for key in ("id", "step")}
        | {names[title]: float(matrix[i, j]) for title, matrix in matrices.items()}
        for i in range(len(rows))
        for j in range(i + 1, len(rows))
    ]
    for title, matrix in matrices.items():
        mean, deviation = mean_barrier(matrix)
        tell(f"{title}: mean barrier {mean:.4g}, standard deviation {deviation:.4g} over {len(pairs)} pairs")
    from regauge.report.population_figures import matrices_figure

    what = f"barrier: {LOSSES[options.loss]}"
    figure = matrices_figure({title: matrix.numpy() for title, matrix in matrices.items()}, what)
    write_picture(figure, pairs, options.output)
    matrix_of.clear()


def draw(options: ZooMap) -> None:
    """Draw networks as points in the plane."""
    require_pictures(options.output, overwrite=options.overwrite)
    if (options.by == "latent") != (options.autoencoder is not None):
        raise UsageError("--by latent and --autoencoder FILE belong together; give both or neither")
    store, chosen, params = networks_of(options)
    if options.color is not None and options.color not in store.rows.names:
        raise UsageError(f"the networks have no column {options.color!r}; there are {', '.join(store.rows.names)}")
    if not 1 <= options.clusters <= len(chosen):
        raise UsageError(f"--clusters is {options.clusters}, but {len(chosen)} networks are drawn")
    matrix_of = Matrices(options, store, chosen)
    distances = distances_of(options, store, params, matrix_of)
    shown, member = flat_map(distances), clusters(distances, options.clusters)
    rows = store.rows.dicts(chosen)
    table = [
        {"id": row["id"], "step": row["step"], "x": x, "y": y, "cluster": cluster}
        | ({} if options.color is None else {options.color: row.get(options.color)})
        for row, (x, y), cluster in zip(rows, shown.points.tolist(), member.tolist(), strict=True)
    ]
    from regauge.report.population_figures import map_figure

    labels, values = member.tolist(), None
    if options.color is not None:
        known = [row.get(options.color) for row in rows]
        is_class = all(type(value) is int for value in known) and len(set(known)) <= GROUPS
        if not is_class and all(value is None or type(value) in (int, float) for value in known):
            values = np.array([np.nan if value is None else float(value) for value in known])
        else:
            labels = list(map(str, known))
    what = options.color or "cluster"
    title = f"{len(rows)} networks by {_BY[options.by]}"
    figure = map_figure(shown.points, labels, title=title, share=shown.share, values=values, what=what)
    if options.clusters > 1:
        counts = np.bincount(member).tolist()
        tell(f"{len(counts)} clusters of {', '.join(map(str, counts))} networks")
    tell(f"two dimensions show {100 * shown.share:.1f}% of the squared distances")
    write_picture(figure, table, options.output)
    matrix_of.clear()


def find_nearest(options: ZooNearest) -> None:
    """Print the networks of a store whose fingerprints are nearest to that of a checkpoint."""
    if options.count < 1:
        raise UsageError(f"--count is {options.count}; it is at least 1")
    store = Store.open(options.store)
    with Checkpoint.open(options.network) as checkpoint:
        params = match(checkpoint.params, store.architecture.on_meta(), checkpoint.label, "the store")
    with show_progress() as progress:
        known = Fingerprints.of(store, progress=progress)
    rows = [
        {"number": number, **{key: store.rows[key][number].item() for key in ("id", "step")}, "distance": distance}
        for number, distance in known.nearest(params, options.count)
    ]
    tell_table("nearest", rows, digits=4)


def networks_of(options: Sampled) -> tuple[Store, Indices, Params]:
    """The store, the numbers of the networks that are looked at, and these."""
    store = Store.open(options.store)
    among = store.rows.where(**conditions_of(options.where))
    if options.checkpoints == "last":
        among = store.rows.final(among)
    chosen = sample(store, options.networks, seed=options.seed, among=among)
    if len(chosen) < 3:
        raise UsageError(f"only {len(chosen)} networks were chosen; three at least are compared")
    return store, chosen, store.read(chosen)


def distances_of(options: ZooMap, store: Store, params: Params, matrix_of: Matrices) -> NDArray[np.float64]:
    """The distances that the map shows, `[networks, networks]`."""
    if options.by == "orbits":
        compare = OrbitDistances(store.require_symmetry(), seed=options.seed)
        return matrix_of("distances of orbits", params, compare).numpy()
    if options.by == "latent":
        latents = learn.load_autoencoder(str(options.autoencoder)).encode(params).double()
        near: NDArray[np.float64] = torch.cdist(latents, latents, compute_mode=EXACT).numpy()
        return near
    if options.by == "universe":
        params = universe(params, store.require_symmetry()).params
    flat = torch.cat([t.double().flatten(1) for t in params.values() if t.is_floating_point()], 1)
    found: NDArray[np.float64] = torch.cdist(flat, flat, compute_mode=EXACT).numpy()
    return found


def together(params: Params, symmetry: rg.Symmetry, options: ZooCompare, matrix_of: Matrices) -> tuple[Params, str]:
    """A population aligned as a whole, and how in words."""
    if options.align == "universe":
        return universe(params, symmetry).params, "in one universe"
    distances = matrix_of("distances of orbits", params, OrbitDistances(symmetry, seed=options.seed))
    center = select(params, int(distances.sum(1).argmin()))
    method = rg.WeightMatching(scales="recompute")  # With data, statistics are computed anew between networks.
    return rg.alignment.align_pairs(center, params, symmetry, method=method).params, "aligned to the medoid"


def task_on(architecture: Architecture, data: str, loss: Loss, batch: int) -> rg.Task:
    """The task of networks on a set's examples that were kept, or on what the user gave for DATA."""
    dtype = next((spec.dtype for spec in architecture.layout if spec.dtype.is_floating_point), torch.float32)
    batches: list[Batch]
    if data in SETS or (":" not in data and not data.endswith(SUFFIXES)):
        examples = load_examples(data)  # refuses other names, and lists the sets
        if examples.is_signals:
            raise UsageError(f"in {data!r} every network has data of its own, so no two have a barrier on them")
        kept = (examples.validation_inputs, examples.validation_targets)
        batches = list(zip(*(torch.split(tensor, batch) for tensor in kept), strict=True))
    else:
        batches = open_batches(data, batch)
    return prepare_statistics(make_task(architecture.module(), batches, loss=loss, dtype=dtype))


def target_of(text: str) -> int | Literal["medoid", "universe"]:
    """The value of `--to`."""
    if text in ("medoid", "universe"):
        return text  # type: ignore[return-value]
    if not text.lstrip("-").isdigit():
        raise UsageError(f"--to {text!r} is no network; give the id of a trajectory, medoid or universe")
    return int(text)


def executor_of(on: str) -> MakeExecutor | None:
    """The executor of jobs."""
    if on == "here":
        return None
    if re.match(r"(tcp|tls|ucx|ws|wss)://", on):
        return dask(on)
    kind, colon, text = on.partition(":")
    if kind not in ("processes", "dask") or (colon and not re.fullmatch(r"[1-9]\d*", text)):
        raise UsageError(
            f"--on {on!r} is no place to train; choose here, processes, processes:4, dask, dask:4 or tcp://HOST:PORT"
        )
    count = int(text) if colon else os.cpu_count() or 1
    return processes(count) if kind == "processes" else dask(workers=count)


def conditions_of(where: tuple[str, ...]) -> dict[str, Any]:
    """Columns and values; numbers and truth values where they read as such."""
    conditions: dict[str, Any] = {}
    for text in where:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--where {text!r} is no condition; write COLUMN=VALUE, for example step=86")
        try:
            conditions[name] = json.loads(value)
        except json.JSONDecodeError:
            conditions[name] = value
    return conditions


def words(store: Store) -> str:
    """The number of networks of a store, and of what is stored of their trainings."""
    runs, one = count_runs(store), f"networks of {store.architecture.name!r}"
    return f"{runs:,} {one}" if len(store) == runs else f"{len(store):,} checkpoints of {runs:,} {one}"


def count_runs(store: Store) -> int:
    """The number of networks of which checkpoints are stored."""
    return len(np.unique(store.rows.column("id").values)) if len(store) else 0
