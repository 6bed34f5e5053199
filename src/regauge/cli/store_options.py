"""Options about stores that several commands share. Nothing here imports torch."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

StoreFolder = Annotated[Positional[Path], arg(help="Folder of the store.")]
NewStore = Annotated[
    Path, arg(aliases=["-o"], help="Folder of the store that is written. An existing store is continued.")
]
KeptCheckpoints = Annotated[
    Literal["last", "all"],
    arg(
        help="Which checkpoints of each run are read, among those that --where selects: the last one that was not "
        "discarded, or all."
    ),
]
Where = Annotated[
    tuple[str, ...], arg(metavar="COLUMN=VALUE", help="Read only networks with these values, for example step=86.")
]
