"""`regauge learn autoencoder`, `encode`, `decode` and `nearest`: one vector for each orbit."""

from collections.abc import Callable
from typing import Any

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.cli.learn_options import LearnAutoencoder
from regauge.cli.learn_settings import inputs_of, net_settings_of, networks_of, run_of, sizes_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_written
from regauge.cli.result_files import require_table, tell_or_write_rows
from regauge.cli.trained_net_options import LearnDecode, LearnEncode, LearnNearest
from regauge.cli.training_output import require_named, tell_training, training_output
from regauge.learn.autoencoder_files import autoencoder_results, decode_store, encode_paths, nearest_paths
from regauge.report import write_page
from regauge.storage import read_networks


def autoencoder(options: LearnAutoencoder) -> None:
    """Train an autoencoder, and write the autoencoder with a report."""
    if not options.inputs:
        raise UsageError("decoded networks are compared by their outputs; give --inputs, such as grid:28x28")
    config = config_of(options)
    with training_output(options, beside=(".html", ".json")) as place:
        with show_status("reading the columns"):
            collection, chosen = networks_of(options)
            inputs = inputs_of(options.inputs)
        with show_progress() as progress:
            made = learn.fit_autoencoder(
                collection, config=config, **run_of(options, chosen, place), inputs=inputs, progress=progress
            )
        with show_status("drawing"):
            grid = sizes_of(options.inputs.removeprefix("grid:")) if options.inputs.startswith("grid:") else None
            results = autoencoder_results(made, collection, inputs, grid=grid, color=options.color)
        write_page({"store": ", ".join(map(str, options.stores)), **results}, place.beside[0])
        made.save(place.path, overwrite=place.overwrite)
    tell(made.about["verdict"], verdict=made.about["verdict"], is_near=made.about["is_near"])
    tell_training(made)
    tell_written(options.output, *place.beside)


def config_of(options: LearnAutoencoder) -> learn.AutoencoderConfig:
    """Return the settings that the user typed."""
    decoder: Any = ws.MLPDecoder() if options.decoder == "mlp" else ws.TemplateDecoder()
    if options.decoder_widths:
        if options.decoder != "mlp":
            raise UsageError("--decoder-widths is only for --decoder mlp; leave it out")
        decoder = ws.MLPDecoder(options.decoder_widths)
    if options.temperature != 1 and options.loss != "distillation":
        raise UsageError("--temperature is only for --loss distillation; leave it out, or add --loss distillation")
    return learn.AutoencoderConfig(
        **net_settings_of(options, learn.AutoencoderConfig),
        decoder=decoder,
        loss=learn.Distillation(options.temperature) if options.loss == "distillation" else learn.SquaredError(),
    )


def encode(options: LearnEncode) -> None:
    """Write the latent vectors of networks."""
    require_table(options.output, overwrite=options.overwrite)
    made = learn.load_autoencoder(options.autoencoder)
    with show_status("encoding"):
        rows = encode_paths(made, require_named(options.networks), options.checkpoints)
    tell_or_write_rows("latents", rows, options.output)


def decode(options: LearnDecode) -> None:
    """Write reconstructions of networks, or networks that are decoded from latent vectors."""
    made, source = learn.load_autoencoder(options.autoencoder), options.networks
    if source.is_dir() or source.suffix == ".csv":
        if options.overwrite:
            raise UsageError("a store is written to a new folder; leave --overwrite out, which is for checkpoints")
        with show_status("decoding"):
            count = len(decode_store(made, source, options.output, options.checkpoints))
        tell(f"written: {options.output}: {count} networks", written=[str(options.output)], networks=count)
        return
    twin = made.canonicalize(read_networks(source).networks)
    rg.save({name: tensor[0] for name, tensor in twin.items()}, options.output, overwrite=options.overwrite)
    tell_written(options.output)


def nearest(options: LearnNearest) -> None:
    """Print the networks of a store that compute nearly the same function as given networks."""
    require_table(options.output, overwrite=options.overwrite)
    made, paths = learn.load_autoencoder(options.autoencoder), require_named(options.networks)
    with show_status("encoding"):
        rows = nearest_paths(made, paths, options.among, count=options.count, checkpoints=options.checkpoints)
    tell_or_write_rows("nearest networks", rows, options.output)


COMMANDS: dict[type, Callable[[Any], None]] = {
    LearnAutoencoder: autoencoder,
    LearnEncode: encode,
    LearnDecode: decode,
    LearnNearest: nearest,
}
"""The commands of this file, by their options."""
