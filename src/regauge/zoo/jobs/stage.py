"""Finished stacks of networks of a job that is not done yet, kept aside until their shards can be written."""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain

import torch

from regauge.core.params import Params
from regauge.storage.store import Store
from regauge.zoo.training import Block

FOLDER = "staged"
"""Its place in the folder of a store; readers do not look there."""
PIECE_BYTES = 64 * 2**20
"""Values of a file at most, unless one block has more."""
END = "end"
MORE = "more"


class Stage:
    """The finished stacks of one job, in a small store of their own; if the job is killed, another one continues there.

    A stack is kept in pieces that bear a mark of the process that trained it, and the last one says so. What a process
    left that died within a stack is not used: another processor may round differently, and a trajectory has one origin.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.folder = store.folder / FOLDER / name
        self.rest: list[Block] = []

    def next_id(self) -> int:
        """The first id that is not in a finished stack; stacks are finished in the order of ids."""
        stacks = self._stacks()
        return _end(stacks[-1][-1]) if stacks else 0

    def keep(self, ids: Sequence[int], blocks: Iterable[Block], *, is_last: bool) -> None:
        """Keep the blocks of a stack as they come; a last stack of one piece is held in memory."""
        mark = secrets.token_hex(4)
        for number, (piece, is_end) in enumerate(self._pieces(blocks)):
            if is_last and is_end and not number:
                self.rest.append(piece)
            else:
                name = f"{ids[0]:09d}-{ids[-1] + 1:09d}-{mark}-{number:06d}-{END if is_end else MORE}"
                self._kept().append(piece.params, piece.rows, name=name)

    def publish(self) -> None:
        """Write all that is kept as shards of the store: `NAME-000001` and so on where it is much, and `NAME` last."""
        for number, (piece, is_end) in enumerate(self._pieces(chain(self._blocks(), self.rest)), 1):
            with suppress(FileExistsError):  # another process did the same
                name = self.name if is_end else f"{self.name}-{number:06d}"
                self.store.append(piece.params, piece.rows, name=name)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # others are staged there
            self.folder.parent.rmdir()

    def _blocks(self) -> Iterator[Block]:
        for name in chain.from_iterable(self._stacks()):
            part = self._kept().part([name])
            yield Block(part.read(slice(None)), part.rows.dicts())

    def _stacks(self) -> list[list[str]]:
        """Names of the pieces of each finished stack."""
        if not self.folder.exists():
            return []
        names = [shard.path.stem for shard in self._kept().shards]
        found: list[list[str]] = []
        for last in names:
            if last.endswith(END) and (not found or _begin(last) >= _end(found[-1][-1])):
                found.append([name for name in names if name.startswith(last.rsplit("-", 2)[0])])
        return found

    def _kept(self) -> Store:
        return Store.create(self.folder, self.store.architecture, storage=self.store.storage)

    def _pieces(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, bool]]:
        """Blocks joined up to the size of a piece, and whether it is the last: there is always one."""
        joined: list[Block] = []
        size = 0
        for block in blocks:
            own = sum(tensor.nbytes for tensor in block.params.values())
            if joined and size + own > PIECE_BYTES:
                yield self._join(joined), False
                joined, size = [], 0
            joined.append(block)
            size += own
        yield self._join(joined), True

    def _join(self, blocks: Sequence[Block]) -> Block:
        layout = self.store.architecture.layout
        params: Params = {
            spec.name: torch.cat(
                [block.params[spec.name].cpu() for block in blocks] or [torch.empty(0, *spec.shape, dtype=spec.dtype)]
            )
            for spec in layout
        }
        return Block(params, [row for block in blocks for row in block.rows])


def _begin(name: str) -> int:
    return int(name.split("-")[0])


def _end(name: str) -> int:
    return int(name.split("-")[1])
