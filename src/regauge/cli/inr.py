"""`regauge inr`: networks that are signals."""

import io
import math
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from regauge.checkpoints.writing import require_writable, save_bytes
from regauge.cli.inr_options import Inr as Options
from regauge.cli.inr_options import InrFit, InrOrbit, InrRender
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell
from regauge.core.params import Params
from regauge.data.shapes import shared_start
from regauge.discovery import discover
from regauge.inr.fields.signal_samples import Queries, entropy_floor
from regauge.inr.fitting import FitConfig, fit, mean_loss
from regauge.inr.named_signals import GridSignal, ImageSignal, Signal, read_signal, signal_samples
from regauge.inr.orbits import orbit, write_orbit
from regauge.inr.rendering.field_values import render_image
from regauge.inr.rendering.mesh import MESH_FORMATS, POINT_FORMATS, Mesh, extract_mesh, save_mesh, save_points
from regauge.inr.rendering.points import PointCloud, Projection, extract_points
from regauge.inr.representation import Inr, load_inr, save_inr
from regauge.report.shape_figures import View, shape_figure
from regauge.training import Adam

SHAPE_SIZES, IMAGE_SIZES = (512, 4), (256, 3)
"""Width and depth unless given."""
RESOLUTION = 128
"""Points along each edge of the grid of a mesh unless given."""


def run(options: Options) -> None:
    """Run one of the commands."""
    commands: dict[type, Callable[[Any], None]] = {InrFit: fit_signal, InrRender: render, InrOrbit: copies}
    commands[type(options.command)](options.command)


def fit_signal(options: InrFit) -> None:
    """Fit one network and write it."""
    require_writable(options.output, overwrite=options.overwrite)
    generator = torch.Generator().manual_seed(options.seed)
    signal = read_signal(options.target)
    inr = inr_for(options, signal)
    config = FitConfig(steps=options.steps, batch=options.batch, optimizer=Adam(options.lr))
    start = start_of(options, inr, generator)
    with show_status("sampling the signal"):
        samples = signal_samples(signal, inr, Queries(), generator=generator)
    with show_progress(is_transient=True) as progress:
        fitted = fit(inr, samples, config, start=start, generator=generator, progress=progress)
    found = mean_loss(inr, fitted.params, samples, config)
    if not math.isfinite(found):
        raise UsageError(f"the fit diverged, its loss is {found}: give a lower --lr than {options.lr:g}")
    save_inr(fitted.params, inr, options.output, overwrite=options.overwrite)
    floor = f", of which {entropy_floor(samples.labels):.6g} are in the labels" if inr.is_distance else ""
    tell(f"loss on all {len(samples):,} samples: {found:.6g}{floor}")
    tell(f"written: {options.output}: {inr.kind} {'-'.join(map(str, inr.widths))}, {inr.signal}")


def inr_for(options: InrFit, signal: Signal) -> Inr:
    """The network that is fitted to a signal."""
    if isinstance(signal, ImageSignal):
        if options.signal is not None:
            raise UsageError(f"{options.target!r} is an image, which has no --signal {options.signal}; leave it out")
        channels, *pixels = signal.values.shape
        return Inr(options.kind, 2, channels, *_sizes(options, IMAGE_SIZES), "image", pixels=(pixels[0], pixels[1]))
    own = options.signal or ("occupancy" if isinstance(signal, GridSignal) else "unsigned")
    return Inr(options.kind, 3, 1, *_sizes(options, SHAPE_SIZES), own)


def start_of(options: InrFit, inr: Inr, generator: torch.Generator) -> Params:
    """Initial parameters, of a network like the one that is fitted."""
    if options.start == "random":
        return inr.start(generator, bias=options.bias)
    if options.start == "shared":
        params, there = shared_start(), Inr()
    else:
        params, there = load_inr(options.start)
    if (there.kind, there.widths, there.omega) != (inr.kind, inr.widths, inr.omega):
        raise UsageError(
            f"the start is a {there.kind} {'-'.join(map(str, there.widths))}, but a {inr.kind} "
            f"{'-'.join(map(str, inr.widths))} is fitted; choose --kind, --width and --depth of the start"
        )
    return params


def render(options: InrRender) -> None:
    """Draw what a network represents."""
    params, inr = load_inr(options.checkpoint)
    formats = (".png", *({"image": (), "unsigned": POINT_FORMATS}.get(inr.signal, MESH_FORMATS)))
    if options.output.suffix not in formats:
        raise UsageError(
            f"{str(options.checkpoint)!r} is a network of signal {inr.signal!r}, which is drawn as "
            f"{', '.join(formats)}, not {options.output.suffix!r}"
        )
    require_writable(options.output, overwrite=options.overwrite, suffixes=formats)
    with show_status("drawing"):
        if inr.signal == "image":
            about = _picture(options, inr, params)
        elif inr.signal == "unsigned":
            generator = torch.Generator().manual_seed(options.seed)
            found = extract_points(inr, params, Projection(count=options.points), generator=generator)
            if not len(found.points):
                raise UsageError(
                    f"{str(options.checkpoint)!r} shows no surface: {found.draws:,} random points were tried, and none "
                    "came close to one; fit the network for more steps, or check where it comes from"
                )
            _write_shape(options, found)
            about = str(found)
        else:
            mesh = extract_mesh(inr, params, resolution=options.resolution or RESOLUTION)
            _write_shape(options, mesh)
            about = f"{len(mesh.vertices):,} vertices, {len(mesh.faces):,} triangles"
    tell(f"written: {options.output}: {about}")


def copies(options: InrOrbit) -> None:
    """Write a store of copies of a network."""
    params, inr = load_inr(options.checkpoint)
    generator = torch.Generator().manual_seed(options.seed)
    with show_status("moving the network"):
        points = torch.rand(8, inr.in_features, generator=generator) * 2 - 1
        symmetry = discover(inr.module(params).eval(), (points.to(next(iter(params.values()))),))
        found = orbit(
            params,
            symmetry,
            options.count,
            generator=generator,
            parts=options.parts or None,
            noise=options.noise,
            reach=options.reach,
        )
        about = {"inr": inr.to_json()}
        store = write_orbit(options.output, found, inr.architecture(), symmetry, seed=options.seed, about=about)
    tell(f"written: {options.output}: {len(store)} copies, moved by {', '.join(options.parts) or 'all parts'}")
    tell(symmetry)


def _sizes(options: InrFit, defaults: tuple[int, int]) -> tuple[int, int]:
    width, depth = defaults
    return width if options.width is None else options.width, depth if options.depth is None else options.depth


def _write_shape(options: InrRender, shape: Mesh | PointCloud) -> None:
    if options.output.suffix == ".png":
        buffer = io.BytesIO()
        shape_figure(shape, View(up="xyz".index(options.up))).savefig(buffer, format="png", dpi=200)
        save_bytes(buffer.getvalue(), options.output)
    elif isinstance(shape, Mesh):
        save_mesh(shape, options.output, overwrite=options.overwrite)
    else:
        save_points(shape.points, options.output, overwrite=options.overwrite)


def _picture(options: InrRender, inr: Inr, params: Params) -> str:
    assert inr.pixels is not None
    if inr.out_features not in (1, 3):
        raise UsageError(f"an image with {inr.out_features} channels has no picture; 1 and 3 have")
    height, width = inr.pixels
    if options.resolution is not None:
        height, width = options.resolution, max(1, round(width * options.resolution / height))
    values = render_image(inr, params, height, width).nan_to_num(0.0)
    pixels = (values * 255).round().to(torch.uint8).squeeze(-1).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    save_bytes(buffer.getvalue(), options.output)
    return f"{height} x {width} pixels"
