"""The table of import and export formats for populations, by their names on the command line."""

from collections.abc import Callable
from importlib.metadata import entry_points

from regauge.zoo.formats.exporting import export_dwsnets, export_npy, export_safetensors, export_small_cnn_zoo
from regauge.zoo.formats.folder import read_deep_align, read_dwsnets, read_folder, read_nfn
from regauge.zoo.formats.matrix_zoos import read_hdf5, read_small_cnn_zoo
from regauge.zoo.formats.ray_tune import read_ray_tune, read_vit_model_zoo
from regauge.zoo.formats.small_transformers import read_small_transformer_zoo
from regauge.zoo.formats.zoo_source import Source

FORMATS: dict[str, Callable[..., Source]] = {
    "folder": read_folder,
    "dwsnets": read_dwsnets,
    "nfn": read_nfn,
    "deep-align": read_deep_align,
    "small-cnn-zoo": read_small_cnn_zoo,
    "small-transformer-zoo": read_small_transformer_zoo,
    "model-zoo-dataset": read_ray_tune,
    "vit-model-zoo": read_vit_model_zoo,
    "hdf5": read_hdf5,
}
"""The importers by their names on the command line."""

EXPORTERS = {
    "safetensors": export_safetensors,
    "npy": export_npy,
    "small-cnn-zoo": export_small_cnn_zoo,
    "dwsnets": export_dwsnets,
}
"""The exporters by their names on the command line."""

GROUP = "regauge.formats"
"""The entry point group by which other packages add importers."""


def importer(name: str) -> Callable[..., Source]:
    """Return the importer of a format, from this package or from another installed package."""
    if name in FORMATS:
        return FORMATS[name]
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name not in others:
        raise ValueError(f"there is no format {name!r}; choose from {', '.join((*FORMATS, *others))}")
    found: Callable[..., Source] = others[name].load()
    return found
