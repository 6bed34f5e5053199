"""`regauge learn autoencoder`, `encode`, `decode` and `nearest`: one vector for each orbit, and back."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regauge import learn
from regauge import weightspace as ws
from regauge.checkpoints.writing import require_writable, save, save_text
from regauge.cli.learn_networks import read_networks, require_named
from regauge.cli.learn_options import LearnAutoencoder, LearnDecode, LearnEncode, LearnNearest
from regauge.cli.learn_settings import inputs_of, net_settings_of, networks_of, run_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, tell_written, write_rows
from regauge.cli.training_output import tell_training, training_output
from regauge.core.params import Params, select
from regauge.core.rounding import round_to
from regauge.core.task import Task
from regauge.learn.running import Runner
from regauge.names import VERSION
from regauge.report.autoencoder_page import autoencoder_page
from regauge.storage import Store
from regauge.storage.collection import Collection, Kept

SHOWN = 10
"""Pictures on the page."""
POINTS = 3000
"""Outputs and latent vectors on the page."""
COLUMNS = {"network": "", "id": "", "step": ""}
"""Columns of the table of latent vectors, empty for a checkpoint, which has no id and no step."""
AT_ONCE = 512
"""Networks that are decoded into one shard."""


def autoencoder(options: LearnAutoencoder) -> None:
    """Train an autoencoder, and write it with a report."""
    if not options.inputs:
        raise UsageError("decoded networks are compared by what they compute; give --inputs, such as grid:28x28")
    config = config_of(options)
    with training_output(
        options.output, beside=(".html", ".json"), resume=options.resume, overwrite=options.overwrite
    ) as place:
        with show_status("reading the columns"):
            collection, chosen = networks_of(options)
            inputs = inputs_of(options.inputs)
        with show_progress() as progress:
            made = learn.fit_autoencoder(
                collection,
                config=config,
                **run_of(options, chosen, place),
                inputs=inputs,
                progress=progress,
            )
        page, numbers = place.beside
        with show_status("drawing"):
            results = results_of(made, options, collection, inputs)
        save_text(json.dumps(results, indent=1) + "\n", numbers)
        save_text(autoencoder_page(numbers), page)
        made.save(place.path, overwrite=place.overwrite)
    tell_training(made.about, made.trained)
    tell_written(options.output, page, numbers)


def config_of(options: LearnAutoencoder) -> learn.AutoencoderConfig:
    """The settings that were typed."""
    decoder: Any = ws.MLPDecoder() if options.decoder == "mlp" else ws.TemplateDecoder()
    if options.decoder_widths:
        if options.decoder != "mlp":
            raise UsageError("--decoder-widths are the hidden layers of the decoder mlp; leave them out")
        decoder = ws.MLPDecoder(options.decoder_widths)
    if options.temperature != 1 and options.loss != "distillation":
        raise UsageError("--temperature softens the classes of --loss distillation; leave it out, or add that")
    return learn.AutoencoderConfig(
        **net_settings_of(options, learn.AutoencoderConfig),
        decoder=decoder,
        loss=learn.Distillation(options.temperature) if options.loss == "distillation" else learn.SquaredError(),
    )


def encode(options: LearnEncode) -> None:
    """Write the latent vectors of networks."""
    require_writable(options.output, overwrite=options.overwrite, suffixes=(".csv",))
    made = learn.load_autoencoder(options.autoencoder)
    with show_status("encoding"):
        rows = []
        for path in require_named(options.networks):
            named = read_networks(path, options.checkpoints)
            latents = encoded(made, named.networks, path)
            for row, latent in zip(named.rows, latents.tolist(), strict=True):
                rows.append({**COLUMNS, **row, **{f"z{k}": value for k, value in enumerate(latent)}})
    write_rows(rows, options.output)
    tell_written(options.output)


def decode(options: LearnDecode) -> None:
    """Write the decoded twins of networks, or the networks of latent vectors."""
    made = learn.load_autoencoder(options.autoencoder)
    source = options.networks
    if source.is_dir() or source.suffix == ".csv":
        if options.overwrite:
            raise UsageError("a store is written into a new folder; --overwrite is for checkpoints")
        with show_status("decoding"):
            count = decode_store(made, source, options.output, options.checkpoints)
        tell(f"written: {options.output}: {count} networks", written=[str(options.output)], networks=count)
        return
    require_writable(options.output, overwrite=options.overwrite)
    twin = made.decode(encoded(made, read_networks(source, options.checkpoints).networks, source))
    save(select(twin, 0), options.output, overwrite=options.overwrite)
    tell_written(options.output)


def decode_store(made: learn.Autoencoder, source: Path, output: Path, checkpoints: Kept) -> int:
    """Decode a store, or a table of latent vectors, into a new store."""
    if source.suffix == ".csv":
        if made.architecture is None:
            raise UsageError(
                "the autoencoder was trained on networks of no store, so that their architecture has no name; decode "
                "in Python"
            )
        latents, rows = read_latents(source)
        architecture, symmetry = made.architecture, net_of(made).symmetries[0]
    else:
        named = read_networks(source, checkpoints)
        store = Store.open(source) if named.store is None else named.store
        architecture, symmetry = store.architecture, store.require_symmetry()
        latents, rows = encoded(made, named.networks, source), store.rows.dicts(named.numbers)
        rows = [{name: value for name, value in row.items() if name != "is_finite"} for row in rows]
    if output.exists():
        raise FileExistsError(f"{str(output)!r} exists; name a new folder")
    target = Store.create(output, architecture, symmetry, about={"kind": "decoded", "from": str(source)})
    dtypes = {spec.name: spec.dtype for spec in architecture.layout}
    for start in range(0, len(rows), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        networks = {name: round_to(tensor, dtypes[name], name) for name, tensor in made.decode(latents[part]).items()}
        target.append(networks, rows[part])
    return len(rows)


def nearest(options: LearnNearest) -> None:
    """Tell which networks of a store compute nearly what others do."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".csv",))
    if options.count < 1:
        raise UsageError(f"--count is {options.count}; it is at least 1")
    made = learn.load_autoencoder(options.autoencoder)
    among = read_networks(options.among, options.checkpoints)
    rows = []
    with show_status("encoding"):
        for path in require_named(options.networks):
            named = read_networks(path, options.checkpoints)
            try:
                numbers, distances = made.nearest(named.networks, among.networks, count=options.count)
            except ValueError as error:
                raise UsageError(f"{str(path)!r} or {str(options.among)!r}: {error}") from error
            rows += [
                {
                    **COLUMNS,
                    **row,
                    "rank": k + 1,
                    "nearest": among.rows[number]["id"],
                    "of step": among.rows[number]["step"],
                    "distance": far,
                }
                for row, own, away in zip(named.rows, numbers.tolist(), distances.tolist(), strict=True)
                for k, (number, far) in enumerate(zip(own, away, strict=True))
            ]
    if options.output is None:
        tell_table("nearest networks", rows)
        return
    write_rows(rows, options.output)
    tell_written(options.output)


def encoded(made: learn.Autoencoder, networks: Store | Params, path: Path) -> Tensor:
    """The latent vectors of the networks at a path."""
    try:
        return made.encode(networks)
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error


def read_latents(path: Path) -> tuple[Tensor, list[dict[str, Any]]]:
    """The latent vectors of a table that `encode` wrote, and an id for each row."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name[:1] == "z" and name[1:].isdecimal()]
    if not names:
        raise UsageError(f"{str(path)!r} has no columns z0, z1, ...; `regauge learn encode` writes such a table")
    try:
        values = torch.tensor([[float(row[name] or "") for name in names] for row in rows])
    except ValueError as error:
        raise UsageError(f"{str(path)!r} has a latent vector that is no row of numbers ({error})") from error
    return values, [{"id": k, "step": 0} for k in range(len(rows))]


def net_of(made: learn.Autoencoder) -> ws.Metanet:
    """The encoder."""
    assert isinstance(made.encoder, ws.Metanet)
    return made.encoder


def results_of(
    made: learn.Autoencoder, options: LearnAutoencoder, collection: Collection, inputs: Any
) -> dict[str, Any]:
    """Everything that the report shows, as JSON."""
    assert made.trained is not None
    assert made.tested is not None
    modules = {"encoder": made.encoder, "decoder": made.decoder}
    return {
        "format": "regauge.autoencoder",
        "version": VERSION,
        "store": ", ".join(str(folder) for folder in options.stores),
        "parts": list(net_of(made).parts),
        "latent": config_of(options).latent,
        "loss": "divergence" if options.loss == "distillation" else "squared error",
        "parameters": {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()},
        **made.about,
        "history": [dict(row) for row in made.trained.history],
        "best": made.trained.best,
        "ended": made.trained.ended,
        "latents": latents_of(made, options, collection),
        **twins_of(made, options, collection, inputs),
    }


def latents_of(made: learn.Autoencoder, options: LearnAutoencoder, collection: Collection) -> dict[str, Any]:
    """Latent vectors of test networks in the plane of their largest variance, and the column that colors them."""
    assert made.tested is not None
    chosen = made.tested[:POINTS]
    latents = made.encode(collection.read(chosen)).double()
    centered = latents - latents.mean(0)
    _, sizes, axes = torch.linalg.svd(centered, full_matrices=False)
    column = collection.column(options.color)[chosen].tolist() if options.color else []
    values = [float(v) if isinstance(v, float) else v for v in column]
    points = (centered @ axes[:2].T).tolist() if len(sizes) > 1 else [[x, 0.0] for x in centered[:, 0].tolist()]
    share = float(sizes[:2].square().sum() / sizes.square().sum().clamp_min(1e-30))
    return {"points": points, "labels": values, "share": share, "column": options.color or ""}


def twins_of(made: learn.Autoencoder, options: LearnAutoencoder, collection: Collection, inputs: Any) -> dict[str, Any]:
    """Outputs of some test networks and of their decoded networks: as pictures if the inputs are a grid of pixels."""
    assert made.tested is not None
    chosen = made.tested[np.linspace(0, len(made.tested) - 1, min(SHOWN, len(made.tested))).astype(np.int64)]
    networks = collection.read(chosen)
    member = collection.members[0]
    assert isinstance(member, Store)
    runner = Runner(Task(member.architecture.module(), ()))
    with torch.no_grad():
        outputs = [runner.outputs(one, inputs).double() for one in (networks, made.canonicalize(networks))]
    sizes = options.inputs.removeprefix("grid:").split("x")
    if options.inputs.startswith("grid:") and len(sizes) == 2:
        shape = (len(chosen), *map(int, sizes), -1)
        originals, decoded = (one.reshape(shape).round(decimals=4).tolist() for one in outputs)
        return {"pictures": {"originals": originals, "decoded": decoded}, "outputs": None}
    flat = [one.flatten() for one in outputs]
    places = torch.linspace(0, len(flat[0]) - 1, min(POINTS, len(flat[0]))).long()
    originals, decoded = (one[places].tolist() for one in flat)
    return {"pictures": None, "outputs": {"originals": originals, "decoded": decoded}}


COMMANDS: dict[type, Callable[[Any], None]] = {
    LearnAutoencoder: autoencoder,
    LearnEncode: encode,
    LearnDecode: decode,
    LearnNearest: nearest,
}
"""The commands of this file."""
