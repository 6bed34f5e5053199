"""`regauge zoo align`, `compare`, `map` and `nearest`: populations modulo their symmetry, by jobs or fingerprints."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import regauge as rg
from regauge import learn, zoo
from regauge.checkpoints.array_files import SUFFIXES
from regauge.cli.options import Loss, UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table
from regauge.cli.result_files import LOSSES, require_pictures, write_picture
from regauge.cli.zoo_population_options import ZooAlign, ZooCompare, ZooMap, ZooNearest
from regauge.connect import prepare_statistics
from regauge.hub import make_task, open_batches
from regauge.report import map_figure, matrices_figure
from regauge.storage import Architecture, Collection, Store

BY = {
    "orbits": "distance modulo the group",
    "universe": "distance after aligning all networks to their mean",
    "weights": "distance of weights without alignment",
    "latent": "distance of latent vectors",
}
"""The words for the distance in the title of a map, by the option `--by`."""


def align(options: ZooAlign) -> None:
    """Align the networks of a store that are not aligned yet."""
    to = target_of(options.to)
    executor, share = zoo.executor_of(options.on), zoo.share_of()
    with show_status("finding the network to which all are aligned"):
        store, jobs = zoo.plan_population(options.store, options.output, to=to, count=options.sample, seed=options.seed)
    with show_progress() as progress:
        done = zoo.run_jobs(jobs, executor=executor, share=share, progress=progress)
    store.refresh()
    tell(f"written: {options.output}: {words(store)}; {done} of {len(jobs.keys)} shards were aligned now")
    left_out = len(Store.open(options.store)) - len(store)
    if not share.world > 1 and left_out:
        tell(f"{left_out} networks with NaN or Inf were left out")
    tell(f"aligned to: {jobs.reference}")


def target_of(text: str) -> int | Literal["medoid", "universe"]:
    """Return the value of `--to`."""
    if text in ("medoid", "universe"):
        return text  # type: ignore[return-value]
    if not text.lstrip("-").isdigit():
        raise UsageError(f"--to {text!r} is not a network of the store; give the id of a run, medoid or universe")
    return int(text)


@contextmanager
def pairs_of(options: ZooCompare | ZooMap) -> Iterator[zoo.PairMatrices]:
    """Return a context with the networks of a command and matrices over their pairs, which exist only in the context.

    A command that is run again continues in the folder `OUT.parts`.
    """
    store = Store.open(options.store)
    among = Collection(store).find(options.where, options.checkpoints)
    chosen = zoo.sample(store, options.networks, seed=options.seed, among=among)
    if len(chosen) < 3:
        raise UsageError(f"only {len(chosen)} networks were selected, but at least three are needed")
    settings = {name: value for name, value in asdict(options).items() if name not in ("output", "overwrite", "on")}
    files = [Path(value) for value in settings.values() if isinstance(value, str) and Path(value).is_file()]
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    folder = options.output.with_name(f"{options.output.name}.parts")
    with show_progress() as progress:
        pairs = zoo.PairMatrices(
            store, chosen, folder, key=repr([settings, states]), executor=zoo.executor_of(options.on), progress=progress
        )
        yield pairs
    pairs.clear()


def compare(options: ZooCompare) -> None:
    """Measure barriers before and after alignment."""
    require_pictures(options.output, overwrite=options.overwrite)
    with pairs_of(options) as pairs:
        task = task_on(pairs.store.architecture, options.data, options.loss, options.batch)
        matrices = pairs.barriers(task, align=options.align, points=options.points, seed=options.seed)
        names = dict(zip(("barrier", "barrier_aligned"), matrices.values(), strict=False))
        rows = pairs.rows(names)
        for title, matrix in matrices.items():
            mean, deviation = zoo.mean_barrier(matrix)
            tell(f"{title}: mean barrier {mean:.4g}, standard deviation {deviation:.4g} over {len(rows)} pairs")
        figure = matrices_figure(
            {title: matrix.numpy() for title, matrix in matrices.items()}, f"barrier: {LOSSES[options.loss]}"
        )
        write_picture(figure, rows, options.output)


def draw(options: ZooMap) -> None:
    """Display networks as points in the plane."""
    require_pictures(options.output, overwrite=options.overwrite)
    if (options.by == "latent") != (options.autoencoder is not None):
        raise UsageError("--by latent and --autoencoder FILE belong together; give both or neither")
    with pairs_of(options) as pairs:
        names, count = pairs.store.rows.names, len(pairs.numbers)
        if options.color is not None and options.color not in names:
            raise UsageError(f"the networks have no column {options.color!r}; choose from {', '.join(names)}")
        if not 1 <= options.clusters <= count:
            raise UsageError(f"--clusters is {options.clusters}, but must be from 1 to {count}, the number of networks")
        if options.by == "latent":
            distances = learn.load_autoencoder(str(options.autoencoder)).distances(pairs.params)
        else:
            distances = pairs.distances(options.by, seed=options.seed)
        shown, member = zoo.flat_map(distances), zoo.clusters(distances, options.clusters)
        rows = pairs.store.rows.dicts(pairs.numbers)
        column = None if options.color is None else [row.get(options.color) for row in rows]
        figure = map_figure(
            shown.points,
            member.tolist(),
            title=f"{count} networks by {BY[options.by]}",
            share=shown.share,
            column=column,
            what=options.color or "cluster",
        )
        table = [
            {"id": row["id"], "step": row["step"], "x": x, "y": y, "cluster": cluster}
            | ({} if options.color is None else {options.color: row.get(options.color)})
            for row, (x, y), cluster in zip(rows, shown.points.tolist(), member.tolist(), strict=True)
        ]
        if options.clusters > 1:
            counts = np.bincount(member).tolist()
            tell(f"{len(counts)} clusters of {', '.join(map(str, counts))} networks")
        tell(f"the plane shows {100 * shown.share:.1f}% of the squared distances")
        write_picture(figure, table, options.output)


def find_nearest(options: ZooNearest) -> None:
    """Print the networks of a store whose fingerprints are nearest to the fingerprint of a checkpoint."""
    store = Store.open(options.store)
    with show_progress() as progress:
        rows = zoo.Fingerprints.of(store, progress=progress).find_nearest(options.network, options.count)
    tell_table("nearest", rows, digits=4)


def task_on(architecture: Architecture, data: str, loss: Loss, batch: int) -> rg.Task:
    """Return the task of networks on the held-out examples of their data set, or on the user's DATA."""
    dtype = next((spec.dtype for spec in architecture.layout if spec.dtype.is_floating_point), torch.float32)
    if ":" in data or data.endswith(SUFFIXES):
        batches = open_batches(data, batch)
    else:
        examples = zoo.load_examples(data)  # refuses other names, and lists the sets
        if examples.is_signals:
            raise UsageError(f"in {data!r}, every network has its own data, which pairs cannot share; name other data")
        kept = (examples.validation_inputs, examples.validation_targets)
        batches = list(zip(*(torch.split(tensor, batch) for tensor in kept), strict=True))
    return prepare_statistics(make_task(architecture.module(), batches, loss=loss, dtype=dtype))


def words(store: Store) -> str:
    """Return the number of networks in a store, and the number of their training runs."""
    runs, one = store.count_runs(), f"networks of {store.architecture.name!r}"
    return f"{runs:,} {one}" if len(store) == runs else f"{len(store):,} checkpoints of {runs:,} {one}"
