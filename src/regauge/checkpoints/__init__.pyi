from .alignments import Alignment as Alignment
from .alignments import alignment_path as alignment_path
from .alignments import load_alignment as load_alignment
from .formats.adapters import adapter_symmetry as adapter_symmetry
from .formats.file_formats import FORMATS as FORMATS
from .formats.file_formats import FileFormat as FileFormat
from .formats.headers import OpenedFile as OpenedFile
