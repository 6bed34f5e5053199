"""Options about stores that several commands share. Nothing here imports torch."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

StoreFolder = Annotated[Positional[Path], arg(help="Folder of the store.")]
NewStore = Annotated[
    Path, arg(aliases=["-o"], help="Folder of the store that is written; one that is there is continued.")
]
KeptCheckpoints = Annotated[
    Literal["last", "all"],
    arg(
        help="Which checkpoints of each run are read: the last one of those that --where leaves and that was not "
        "discarded, or all of them."
    ),
]
Where = Annotated[
    tuple[str, ...], arg(metavar="COLUMN=VALUE", help="Only networks with these values, for example step=86.")
]
