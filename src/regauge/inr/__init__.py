"""Networks that are signals: implicit representations of images and 3D shapes.

The names below are imported when they are first used; everything else is in the packages that they come from.

References:
    Ballerini (2023), Alignment of implicit neural representations of 3D shapes via permutation symmetries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.inr.architecture import Inr, load_inr, read_inr, save_inr
    from regauge.inr.embedding.training import EmbeddingTraining, train_embedding
    from regauge.inr.fields.fields import CloudField, MeshField
    from regauge.inr.fields.files import read_signal
    from regauge.inr.fields.labels import DistanceLabels, labels_of
    from regauge.inr.fields.queries import Queries
    from regauge.inr.fields.samples import Samples, field_samples, image_samples, voxel_samples
    from regauge.inr.fitting.fit import Fit, fit, mean_loss
    from regauge.inr.fitting.population import fit_images, fit_many, image_inr
    from regauge.inr.orbits.orbit import Orbit, orbit, write_orbit
    from regauge.inr.orbits.recovery import recovery
    from regauge.inr.rendering.files import load_mesh, load_points, save_mesh, save_points
    from regauge.inr.rendering.image import render_image
    from regauge.inr.rendering.mesh import Mesh, extract_mesh
    from regauge.inr.rendering.metrics import compare_points, psnr
    from regauge.inr.rendering.points import Projection, extract_points
    from regauge.inr.rendering.strips import load_strips, render_strip, save_strips

_HOMES = {
    "architecture": ("Inr", "load_inr", "read_inr", "save_inr"),
    "embedding.training": ("EmbeddingTraining", "train_embedding"),
    "fields.fields": ("CloudField", "MeshField"),
    "fields.files": ("read_signal",),
    "fields.labels": ("DistanceLabels", "labels_of"),
    "fields.queries": ("Queries",),
    "fields.samples": ("Samples", "field_samples", "image_samples", "voxel_samples"),
    "fitting.fit": ("Fit", "fit", "mean_loss"),
    "fitting.population": ("fit_images", "fit_many", "image_inr"),
    "orbits.orbit": ("Orbit", "orbit", "write_orbit"),
    "orbits.recovery": ("recovery",),
    "rendering.files": ("load_mesh", "load_points", "save_mesh", "save_points"),
    "rendering.image": ("render_image",),
    "rendering.mesh": ("Mesh", "extract_mesh"),
    "rendering.metrics": ("compare_points", "psnr"),
    "rendering.points": ("Projection", "extract_points"),
    "rendering.strips": ("load_strips", "render_strip", "save_strips"),
}
_MODULES = {name: f"regauge.inr.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "CloudField",
    "DistanceLabels",
    "EmbeddingTraining",
    "Fit",
    "Inr",
    "Mesh",
    "MeshField",
    "Orbit",
    "Projection",
    "Queries",
    "Samples",
    "compare_points",
    "extract_mesh",
    "extract_points",
    "field_samples",
    "fit",
    "fit_images",
    "fit_many",
    "image_inr",
    "image_samples",
    "labels_of",
    "load_inr",
    "load_mesh",
    "load_points",
    "load_strips",
    "mean_loss",
    "orbit",
    "psnr",
    "read_inr",
    "read_signal",
    "recovery",
    "render_image",
    "render_strip",
    "save_inr",
    "save_mesh",
    "save_points",
    "save_strips",
    "train_embedding",
    "voxel_samples",
    "write_orbit",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'regauge.inr' has no attribute {name!r}; its names are {__all__}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
