from .architecture import Architecture as Architecture
from .collection import Collection as Collection
from .loader import Batch as Batch
from .loader import Loader as Loader
from .statistics import Statistics as Statistics
from .store.shard_file import verify as verify
from .store.store import Store as Store
