from .alignments import Alignment as Alignment
from .formats.adapters import adapter_symmetry as adapter_symmetry
from .formats.file_formats import FORMATS as FORMATS
from .formats.file_formats import FileFormat as FileFormat
from .formats.headers import OpenedFile as OpenedFile
