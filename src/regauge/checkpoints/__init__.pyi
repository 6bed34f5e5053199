from .alignments import Alignment as Alignment
from .alignments import load_alignment as load_alignment
from .alignments import save_alignment as save_alignment
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import load as load
from .formats.adapters import adapter_symmetry as adapter_symmetry
from .output import Output as Output
from .writing import save as save
