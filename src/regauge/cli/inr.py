"""`regauge inr`: fit, draw and copy networks that represent images and shapes."""

import io
from typing import Any

import torch
from PIL import Image

import regauge as rg
from regauge.checkpoints.writing import require_writable, save_bytes
from regauge.cli.config_options import settings_of
from regauge.cli.inr_options import InrFit, InrOrbit, InrRender
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell
from regauge.inr import FitConfig, Inr, Mesh, load_inr
from regauge.inr.rendering.mesh import MESH_FORMATS, POINT_FORMATS
from regauge.inr.signal_fits import fit_signal
from regauge.report.shape_figures import View, shape_figure
from regauge.training import Adam

RESOLUTION = 128
"""The default number of points along each edge of the grid for a mesh."""


def fit(options: InrFit) -> None:
    """Fit one network, and write the network."""
    require_writable(options.output, overwrite=options.overwrite)
    with show_progress(is_transient=True) as progress:
        made = fit_signal(
            options.target,
            FitConfig(**settings_of(options, FitConfig), optimizer=Adam(options.lr)),
            kind=options.kind,
            width=options.width,
            depth=options.depth,
            signal=options.signal,
            start=options.start,
            bias=options.bias,
            generator=torch.Generator().manual_seed(options.seed),
            progress=progress,
        )
    inr = made.inr
    inr.save(made.params, options.output, overwrite=options.overwrite)
    floor = "" if made.floor is None else f", of which {made.floor:.6g} are in the labels"
    tell(f"loss on all {made.samples:,} samples: {made.loss:.6g}{floor}")
    tell(f"written: {options.output}: {inr.kind} {'-'.join(map(str, inr.widths))}, {inr.signal}")


def render(options: InrRender) -> None:
    """Draw the signal that a network represents."""
    params, inr = load_inr(options.checkpoint)
    formats = (".png", *({"image": (), "unsigned": POINT_FORMATS}.get(inr.signal, MESH_FORMATS)))
    if options.output.suffix not in formats:
        raise UsageError(
            f"{str(options.checkpoint)!r} is a network of signal {inr.signal!r}, which is written as "
            f"{', '.join(formats)}, not {options.output.suffix!r}"
        )
    require_writable(options.output, overwrite=options.overwrite, suffixes=formats)
    with show_status("drawing"):
        if inr.signal == "image":
            about = _picture(options, inr, params)
        elif inr.signal == "unsigned":
            generator = torch.Generator().manual_seed(options.seed)
            found = rg.inr.extract_points(inr, params, rg.inr.Projection(count=options.points), generator=generator)
            if not len(found.points):
                raise UsageError(
                    f"no surface was found in {str(options.checkpoint)!r}: none of {found.draws:,} random points came "
                    "close to one; fit the network for more steps, or check the checkpoint"
                )
            _write_shape(options, found)
            about = str(found)
        else:
            mesh = rg.inr.extract_mesh(inr, params, resolution=options.resolution or RESOLUTION)
            _write_shape(options, mesh)
            about = f"{len(mesh.vertices):,} vertices, {len(mesh.faces):,} triangles"
    tell(f"written: {options.output}: {about}")


def copies(options: InrOrbit) -> None:
    """Write copies of a network to a store."""
    params, inr = load_inr(options.checkpoint)
    generator = torch.Generator().manual_seed(options.seed)
    with show_status("moving the network"):
        points = torch.rand(8, inr.in_features, generator=generator) * 2 - 1
        symmetry = rg.discover(inr.module(params).eval(), (points.to(next(iter(params.values()))),))
        found = rg.inr.orbit(
            params,
            symmetry,
            options.count,
            generator=generator,
            parts=options.parts or None,
            noise=options.noise,
            reach=options.reach,
        )
        about = {"inr": inr.to_json()}
        store = rg.inr.write_orbit(options.output, found, inr.architecture(), symmetry, seed=options.seed, about=about)
    tell(f"written: {options.output}: {len(store)} copies, moved by {', '.join(options.parts) or 'all parts'}")
    tell(symmetry)


def _write_shape(options: InrRender, shape: Any) -> None:
    if options.output.suffix == ".png":
        buffer = io.BytesIO()
        shape_figure(shape, View(up="xyz".index(options.up))).savefig(buffer, format="png", dpi=200)
        save_bytes(buffer.getvalue(), options.output)
    elif isinstance(shape, Mesh):
        rg.inr.save_mesh(shape, options.output, overwrite=options.overwrite)
    else:
        rg.inr.save_points(shape.points, options.output, overwrite=options.overwrite)


def _picture(options: InrRender, inr: Inr, params: rg.Params) -> str:
    assert inr.pixels is not None
    if inr.out_features not in (1, 3):
        raise UsageError(f"an image with {inr.out_features} channels cannot be drawn; give one with 1 or 3")
    height, width = inr.pixels
    if options.resolution is not None:
        height, width = options.resolution, max(1, round(width * options.resolution / height))
    values = rg.inr.render_image(inr, params, height, width).nan_to_num(0.0)
    pixels = (values * 255).round().to(torch.uint8).squeeze(-1).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    save_bytes(buffer.getvalue(), options.output)
    return f"{height} x {width} pixels"


COMMANDS = {InrFit: fit, InrRender: render, InrOrbit: copies}
