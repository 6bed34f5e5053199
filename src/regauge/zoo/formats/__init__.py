"""Import and export: public zoos in, and files that other programs read out.

An importer is a function of a path, and of those options of `regauge zoo import` that it takes, by their names:
`template`, `beside`, `architecture`, `inputs`, `activation` and `dataset`. It returns a `Source`. Other packages add
importers by the entry point `regauge.formats`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from regauge.zoo.formats.exporting import export_dwsnets, export_npy, export_safetensors, export_small_cnn_zoo
from regauge.zoo.formats.folder import read_deep_align, read_dwsnets, read_folder
from regauge.zoo.formats.matrices import read_hdf5, read_small_cnn_zoo
from regauge.zoo.formats.ray_tune import read_ray_tune
from regauge.zoo.formats.source import Imported, Source, import_zoo

FORMATS: dict[str, Callable[..., Source]] = {
    "folder": read_folder,
    "dwsnets": read_dwsnets,
    "deep-align": read_deep_align,
    "small-cnn-zoo": read_small_cnn_zoo,
    "model-zoo-dataset": read_ray_tune,
    "hdf5": read_hdf5,
}
"""The importers by the names of the command line."""

EXPORTERS = {
    "safetensors": export_safetensors,
    "npy": export_npy,
    "small-cnn-zoo": export_small_cnn_zoo,
    "dwsnets": export_dwsnets,
}
"""The exporters by the names of the command line."""

GROUP = "regauge.formats"
"""Entry points of other packages that are importers too."""


def importer(name: str) -> Callable[..., Source]:
    """The importer of a format, of this package or of another one that is installed."""
    if name in FORMATS:
        return FORMATS[name]
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name not in others:
        raise ValueError(f"there is no format {name!r}; there are {', '.join((*FORMATS, *others))}")
    found: Callable[..., Source] = others[name].load()
    return found


__all__ = [
    "EXPORTERS",
    "FORMATS",
    "Imported",
    "Source",
    "import_zoo",
    "importer",
    "read_deep_align",
    "read_dwsnets",
    "read_folder",
    "read_hdf5",
    "read_ray_tune",
    "read_small_cnn_zoo",
]
