from .architecture import Architecture as Architecture
from .checkpoints.formats.adapters import adapter_symmetry as adapter_symmetry
from .collection import Collection as Collection
from .loader import Batch as Batch
from .loader import Loader as Loader
from .statistics import Statistics as Statistics
from .store import Store as Store
