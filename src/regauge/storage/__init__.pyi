from .architecture import Architecture as Architecture
from .store import Store as Store
