"""The bytes of tensors that are alive at once."""

import weakref
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """A counter of the bytes of tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and a guard against it would cost more than counting."""
        return False

    def count(self, tensor: object) -> None:
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        nbytes = storage.nbytes()

        def forget(_: object) -> None:
            del self.known[key]
            self.now -= nbytes

        self.known[key] = weakref.ref(storage, forget)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in (made,) if isinstance(made, Tensor) else pytree.tree_leaves(made):
            self.count(tensor)
        return made
