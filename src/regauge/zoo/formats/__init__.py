"""Import and export: public zoos in, and files that other programs read out."""

from regauge.zoo.formats.exporting import export_dwsnets, export_npy, export_safetensors, export_small_cnn_zoo
from regauge.zoo.formats.folder import read_folder
from regauge.zoo.formats.hdf5 import read_hdf5
from regauge.zoo.formats.ray_tune import read_ray_tune
from regauge.zoo.formats.sequential import read_deep_align, read_dwsnets
from regauge.zoo.formats.small_cnn_zoo import read_small_cnn_zoo
from regauge.zoo.formats.source import Block, Source, import_zoo

EXPORTERS = {
    "safetensors": export_safetensors,
    "npy": export_npy,
    "small-cnn-zoo": export_small_cnn_zoo,
    "dwsnets": export_dwsnets,
}
"""By the names of the command line."""

__all__ = [
    "EXPORTERS",
    "Block",
    "Source",
    "export_dwsnets",
    "export_npy",
    "export_safetensors",
    "export_small_cnn_zoo",
    "import_zoo",
    "read_deep_align",
    "read_dwsnets",
    "read_folder",
    "read_hdf5",
    "read_ray_tune",
    "read_small_cnn_zoo",
]
