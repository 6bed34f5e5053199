from .architecture import Architecture as Architecture
from .collection import Collection as Collection
from .loader import Batch as Batch
from .loader import Loader as Loader
from .named_networks import read_networks as read_networks
from .statistics import Statistics as Statistics
from .store import Store as Store
from .store.shard_file import verify as verify
