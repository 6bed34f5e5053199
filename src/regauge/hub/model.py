"""Models by name: a module, its example inputs, and its symmetry, each computed when it is first used."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.counted import shorten
from regauge.core.symmetry import Symmetry
from regauge.discovery import TraceError, discover
from regauge.hub.build_model import Built, build_model, describe_inputs, folder_of
from regauge.hub.symmetry_cache import Traced, Tracing, trace_once
from regauge.hub.user_code import Values


class Model:
    """A model opened by name, as `open_model` returns it. The model is built and traced when it is first used.

    Attributes:
        name: The name of the model.
        tracing: The settings of tracing.
        values: The condition under which the model is initialized, instead of built on the meta device; see
            `open_model`.
        retrace: Whether the model is traced again although its symmetry is known.
        verify: Whether the symmetry is verified numerically. Default: only if verification takes little time.
    """

    def __init__(
        self,
        name: str,
        tracing: Tracing,
        *,
        values: Values = "if small",
        retrace: bool = False,
        verify: bool | None = None,
        built: Built | None = None,
    ) -> None:
        self.name, self.tracing, self.values, self.retrace, self.verify = name, tracing, values, retrace, verify
        self._given = built

    def __repr__(self) -> str:
        return f"Model({self.name!r})"

    @cached_property
    def built(self) -> Built:
        """The module with its example inputs, or with inputs of the shapes and dtypes that the caller gave."""
        built = build_model(self.name, self.values) if self._given is None else self._given
        if self._given is None and self.tracing.input_shape:
            device = "meta" if built.is_meta else "cpu"
            inputs = describe_inputs(self.tracing.input_shape, self.tracing.input_dtype, device)
            built = replace(built, inputs=inputs, kwargs=None, further=())
        return built

    @property
    def module(self) -> nn.Module:
        """The module, in evaluation mode; uninitialized if it is on the meta device."""
        return self.built.module

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Positional inputs that the module accepts; empty if all inputs are keyword inputs.

        Raises:
            ValueError: There are neither positional nor keyword inputs.
        """
        self._require_inputs()
        return self.built.inputs

    @property
    def kwargs(self) -> Mapping[str, Any] | None:
        """Keyword inputs that the module accepts: the inputs of the trace, or else the first example inputs without an
        error.

        Raises:
            ValueError: Neither keyword nor positional inputs are known.
        """
        self._require_inputs()
        return self._traced_now.kwargs if "_traced_now" in self.__dict__ else self.built.kwargs

    def trace(self) -> Traced:
        """Trace the model in this process, at most once, even if the cache contains its symmetry."""
        return self._traced_now

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry. For a folder, the user's cache stores the symmetry under a key that includes the content of
        config.json.
        """
        return self.traced.symmetry

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that describes the network, if the model's name is the path of a checkpoint."""
        return self.built.checkpoint

    @property
    def is_meta(self) -> bool:
        """Whether the module is on the meta device."""
        return self.built.is_meta

    @cached_property
    def blank(self) -> nn.Module:
        """The module of the model. A module that is not built yet is built on the meta device."""
        is_built = "built" in self.__dict__ or self._given is not None
        return self.module if is_built else build_model(self.name, "never").module

    @cached_property
    def traced(self) -> Traced:
        """The result of tracing the model, or the cached result of an earlier run."""
        if self._given is not None or "_traced_now" in self.__dict__ or folder_of(self.name) is None:
            return self._traced_now  # A factory may make different models in each run: no cache.
        settings = [self.values, self.verify]
        return trace_once(self.name, self.tracing, settings, lambda: self._traced_now, retrace=self.retrace)

    def in_folder(self, folder: Path) -> "Model":
        """Return the model of another folder, traced with the same settings."""
        return Model(str(folder), self.tracing, values=self.values, retrace=self.retrace, verify=self.verify)

    def on(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> "Model":
        """Return a copy of the model whose trace and calls use other inputs, such as a batch of data."""
        built = replace(self.built, inputs=inputs, kwargs=kwargs, further=())
        return Model(self.name, self.tracing, values=self.values, verify=self.verify, built=built)

    @cached_property
    def _traced_now(self) -> Traced:
        """The result of tracing the model in this process.

        The trace uses the first example inputs that reach all submodels, or that are embeddings. Embeddings replace the
        outputs of skipped submodels, so the symmetry does not change the axes of the replaced outputs.
        """
        self._require_inputs()
        built = self.built
        first: Exception | None = None
        for kwargs in itertools.chain([built.kwargs], built.further):
            try:
                found, kwargs = self._trace_on(kwargs)
            except (TraceError, ValueError) as error:
                first = first or error
                continue
            unreached, notes = self._unreached(found), list[str]()
            if unreached and "inputs_embeds" not in (kwargs or {}):
                first = first or ValueError(
                    f"no example inputs are known that reach {shorten(unreached)} of {type(built.module).__name__}; "
                    "write a factory that returns (module, (), {...})"
                )
                continue
            if unreached:
                stay = "cannot be traced with the other parts, so they and the embeddings are not changed"
                notes.append(f"{shorten(unreached)} {stay}")
            return Traced(found, built.module.state_dict(), built.is_meta, kwargs=kwargs, notes=tuple(notes))
        assert first is not None
        raise ValueError(str(first)) from first

    def _trace_on(self, kwargs: Mapping[str, Any] | None) -> tuple[Symmetry, Mapping[str, Any] | None]:
        """Return the symmetry for some inputs, with expert loops made traceable if necessary, and the inputs."""
        built, verify = self.built, self.verify and not self.is_meta

        def find(kwargs: Mapping[str, Any] | None) -> Symmetry:
            return discover(
                built.module,
                built.inputs,
                kwargs,
                outputs=self.tracing.outputs or None,
                keep=self.tracing.keep,
                move=self.tracing.move,
                verify=verify,
            )

        try:
            return find(kwargs), kwargs
        except TraceError as error:
            from regauge.hub.every_expert import visit_every_expert
            from regauge.hub.example_inputs import with_masks

            masked = with_masks(built.module, dict(kwargs or {}))
            if not visit_every_expert(built.module, built.inputs, masked):
                raise
            first = error
        try:
            return find(masked), masked
        except TraceError:
            raise first from None

    def _unreached(self, found: Symmetry) -> list[str]:
        """Return submodels that a folder's example inputs skip. For factories, the result is empty, because users
        choose the inputs.
        """
        if not self.built.further:
            return []
        from regauge.hub.folder_model import unreached_parts

        return unreached_parts(self.module, found)

    def _require_inputs(self) -> None:
        if not self.built.inputs and not self.built.kwargs:
            raise ValueError(
                self.built.lack
                or f"{self.name!r} gives no example inputs: let the factory return (module, example_inputs), "
                "or describe them, for example `input_shape=2x3x32x32`"
            )


def open_model(
    name: str | Path,
    *,
    input_shape: Sequence[str] = (),
    input_dtype: Sequence[str] = (),
    outputs: Sequence[str] = (),
    keep: Sequence[str] = (),
    move: Sequence[str] = (),
    values: Values = "if small",
    verify: bool | None = None,
    retrace: bool = False,
) -> Model:
    """Open a model by name: its module, its example inputs, and its symmetry.

    The model is built and traced only when it is first used. The symmetry of a folder's model is stored in the user's
    cache. A later process reads the symmetry from the cache instead of tracing the model. Code in a folder is never
    run, and nothing is downloaded.

    Args:
        name: A folder with config.json in Hugging Face style, or `org/model` for a model in the Hugging Face hub's
            cache on this machine. The name may also be `package.module:factory` or `file.py:factory`: a function that
            returns a module, (module, example_inputs) or (module, example_inputs, example_kwargs). The name may also be
            the path of a weight file whose header describes its network, such as a file of `rg.inr.Inr.save`.
        input_shape: Shapes of positional inputs that replace the model's example inputs, for example `["2x3x32x32"]`.
        input_dtype: Dtypes of positional inputs, for example `["int64"]`; float32 by default.
        outputs: Names of the outputs that the symmetry must preserve; all tensors by default.
        keep: Names or patterns of frozen parameters that the symmetry must not change, such as masks; see
            `rg.discover`.
        move: Names or patterns of further buffers that the symmetry transforms like weights, in addition to running
            statistics.
        values: "always" initializes the model, and "never" builds it on the meta device. "if small" initializes models
            below 150 million parameters. The weights of a folder's model are random, because only `open_networks` reads
            the checkpoint.
        verify: Whether the symmetry is verified numerically. Default: only if verification takes little time.
        retrace: Whether the model is traced again although its symmetry is known from an earlier run.
    """
    tracing = Tracing(tuple(input_shape), tuple(input_dtype), tuple(outputs), tuple(keep), tuple(move))
    return Model(str(name), tracing, values=values, retrace=retrace, verify=verify)
