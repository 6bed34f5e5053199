"""`regauge zoo`: train, import, export, check and describe populations on the disk."""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regauge import zoo
from regauge.cli import zoo_populations
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, warn
from regauge.cli.zoo_options import ZooCommand, ZooExport, ZooImport, ZooInfo, ZooTrain, ZooVerify
from regauge.cli.zoo_population_options import ZooAlign, ZooCompare, ZooMap, ZooNearest
from regauge.cli.zoo_populations import words
from regauge.core.devices import find_device
from regauge.hub import call_factory, describe_inputs
from regauge.storage import Architecture, Collection, Store, verify


def run(options: ZooCommand) -> None:
    """Run one of the commands."""
    commands: dict[type, Callable[[Any], None]] = {
        ZooTrain: train,
        ZooInfo: info,
        ZooImport: import_,
        ZooExport: export,
        ZooVerify: check,
        ZooNearest: zoo_populations.find_nearest,
        ZooAlign: zoo_populations.align,
        ZooCompare: zoo_populations.compare,
        ZooMap: zoo_populations.draw,
    }
    try:
        commands[type(options)](options)
    except zoo.JobsError as error:
        raise UsageError(str(error)) from error


def train(options: ZooTrain) -> None:
    """Train the networks of a population that are not stored yet."""
    config = config_of(options)
    executor, share = zoo.executor_of(options.on), zoo.share_of()
    with show_status("preparing"):
        find_device(options.device, is_here=not options.on.startswith("tcp://"))
        store, jobs = zoo.plan_training(
            config, options.output, size=options.shard, storage=options.storage, device=options.device
        )
    if jobs.missing():
        each = config.count_checkpoints(zoo.load_examples(config.data))
        size = each * config.count * store.architecture.size * (2 if options.storage else 4) / 2**20
        tell(
            f"{config.count:,} networks, {each:,} of each stored: {each * config.count:,} checkpoints of about "
            f"{size:,.1f} MiB"
        )
    if share.world > 1:
        warn(f"this process trains part {share.rank} of {share.world}")
    with show_progress() as progress:
        done = jobs.run(executor=executor, share=share, progress=progress)
    store.refresh()
    tell(f"written: {options.output}: {words(store)}; trained now: {done} of {len(jobs.keys)} shards")


def info(options: ZooInfo) -> None:
    """Print the contents of a store."""
    store = Store.open(options.store)
    counts = {
        "networks": store.count_runs(),
        "checkpoints": len(store),
        "shards": len(store.shards),
        "values": store.architecture.size,
    }
    tell(f"{options.store}: {words(store)}", store=str(options.store), **counts)
    size = sum(shard.size for shard in store.shards)
    kept = store.storage or "as they are"
    shards = f"shards: {len(store.shards)}, {size / 2**20:.1f} MiB"
    tell(f"{shards}; {store.architecture.size} values each, kept {kept}", bytes=size, kept=kept)
    if store.about:
        tell(f"about: {store.made_by}", about=store.about)
    tell_table("columns", [{"column": name, "values": text} for name, text in store.rows.summary().items()])
    known = None if store.symmetry is None else json.loads(store.symmetry.to_json())
    tell("the symmetry of the networks is unknown" if store.symmetry is None else store.symmetry, symmetry=known)


def import_(options: ZooImport) -> None:
    """Import networks from other programs into a store."""
    with show_status("reading the names of the networks"):
        source = source_of(options)
    known = Store.find(options.output)
    before = 0 if known is None else len(known)
    with show_progress() as progress:
        store = zoo.import_zoo(source, options.output, storage=options.storage, progress=progress)
    strange = len(store.rows.where(is_finite=False))
    marked = f"; marked because of NaN or Inf: {strange}" if strange else ""
    tell(f"written: {options.output}: {words(store)}{marked}; {len(store) - before} were imported now")
    if store.symmetry is None:
        tell("the symmetry of the networks is unknown; give --model and --input-shape to find it")


def export(options: ZooExport) -> None:
    """Write networks of a store as files of other formats."""
    store = Store.open(options.store)
    chosen = Collection(store).find(options.where, options.checkpoints)
    if not len(chosen):
        raise UsageError(f"no network of {len(store)} has {' '.join(options.where)!r}; choose other values")
    with show_progress() as progress:
        zoo.EXPORTERS[options.format](store, options.output, chosen.tolist(), progress=progress)
    tell(f"written: {options.output}: {len(chosen)} networks")


def check(options: ZooVerify) -> None:
    """Compare the stored checksums of a store with its files."""
    with show_progress() as progress:
        report = verify(options.store, progress=progress)
    for sentence in report.damaged.values():
        tell(sentence)
    if report.leftovers:
        tell(f"{len(report.leftovers)} files are incomplete; delete them when no process is writing to the store")
    tell(f"{report.shards} shards with {report.networks} networks are intact, {len(report.damaged)} are damaged")
    if not report.ok:
        sys.exit(1)


def config_of(options: ZooTrain) -> zoo.PopulationConfig:
    """Return the population that the user named, with the number of networks and the seed that the user typed."""
    if options.networks is not None and options.networks < 1:
        raise UsageError(f"--networks is {options.networks}; it must be at least 1")
    name = options.config
    config: Any = call_factory(name, "CONFIG") if ":" in name else zoo.presets.find_preset(name)
    if not isinstance(config, zoo.PopulationConfig):
        raise UsageError(
            f"{options.config!r} returned a {type(config).__name__}; it must return a regauge.zoo PopulationConfig"
        )
    return replace(
        config,
        count=config.count if options.networks is None else options.networks,
        seed=config.seed if options.seed is None else options.seed,
    )


def source_of(options: ZooImport) -> zoo.Source:
    """Return the source to import, from an importer that accepts the given options."""
    read = zoo.importer(options.format)
    given = {
        "template": options.template,
        "beside": options.beside or None,
        "architecture": architecture_of(options),
        "inputs": describe_inputs(options.input_shape, ()) if options.input_shape else None,
        "activation": options.activation,
        "dataset": options.dataset,
    }
    taken = inspect.signature(read).parameters
    for name, value in given.items():
        if value is not None and name not in taken:
            option = {"architecture": "model", "inputs": "input-shape"}.get(name, name)
            raise UsageError(f"--{option} cannot be used with --format {options.format}; leave it out")
    return read(options.source, **{name: value for name, value in given.items() if value is not None})


def architecture_of(options: ZooImport) -> Architecture | None:
    """Return the model that the user named."""
    if options.model is None:
        return None
    if ".py:" in options.model:
        raise UsageError(
            f"--model {options.model!r} is a file, but later commands must be able to import the model of a store; put "
            "it into a package and give package.module:factory"
        )
    try:
        settings = json.loads(options.settings)
    except json.JSONDecodeError as error:
        raise UsageError(f"--settings {options.settings!r} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(
            f"--settings {options.settings!r} is not a mapping; write for example '{{\"widths\": [784, 10]}}'"
        )
    return Architecture(options.model.rpartition(":")[2], options.model, settings)
