"""A record of what constructors do to tensors without memory, to repeat it for real where needed."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dryfit.gpu.private_apis.torch_modes import (
    OpOverload,
    TorchDispatchMode,
    schema_of,
    without_dispatch_modes,
    without_function_modes,
)
from dryfit.gpu.private_apis.torch_tensors import storage_key
from dryfit.settings.errors import LoadError
from dryfit.settings.splits import derive_seed

# Make random operations draw from our generator: the process's own is neither read nor advanced.


_aten = torch.ops.aten
# Factories that draw from the global generator, and their overloads that take one.
_WITH_GENERATOR = {
    _aten.rand.default: _aten.rand.generator,
    _aten.randn.default: _aten.randn.generator,
    _aten.randint.default: _aten.randint.generator,
    _aten.randint.low: _aten.randint.low_generator,
    _aten.randperm.default: _aten.randperm.generator,
}


def takes(func: Any, name: str) -> bool:
    """Whether an operation has an argument of that name."""
    return any(argument.name == name for argument in schema_of(func).arguments)


def drawing(func: Any, kwargs: dict[str, Any]) -> Any | None:
    """Return the overload that takes a generator; None for an operation that does not draw from the global one."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return None
    func = _WITH_GENERATOR.get(func, func)
    return func if takes(func, "generator") else None


class Draws(TorchDispatchMode):
    """Give one generator to all random operations of this thread that name none.

    Args:
        generator: What they draw from.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = drawing(func, kwargs)
        return func(*args, **kwargs) if drawn is None else drawn(*args, **{**kwargs, "generator": self._generator})


# While a :class:`dryfit.meta.construction.ConstructionRecorder` is active in a thread, an uninitialised allocation
# gives a tensor on the meta device, and every operation on such a tensor is recorded on the :class:`Tape`.
# :meth:`Tape.realise` repeats just the steps that lead to one tensor. Deferred initialisation is an idea of
# torchdistx (``torchdistx.deferred_init``); here values that a constructor *computes* are never deferred, so that it
# may read them.
#
# A tensor is named by the number of its storage on the tape, which is kept on the storage object itself: it survives
# wrapping in a Parameter, views and ties, and needs no table that could outlive the model.


_MARK = "_dryfit_birth"
UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_permuted.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
# Operations that replace every element.
_OVERWRITING = frozenset(
    {
        _aten.copy_.default,
        _aten.fill_.Scalar,
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
    }
)


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor of the tape: the number of its storage, and its view of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation; tensors without memory are :class:`_Ref`, all others are copies taken when it ran.

    Attributes:
        reads: Storages it reads or writes in place.
        results: Deferred tensors it returned; those in storages it did not read are new.
        seed: Of a random operation; None for others.
        erases: The storage whose whole content it replaces; earlier writes no longer matter.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    results: tuple[_Ref, ...]
    seed: int | torch.Generator | None
    erases: int | None = None


class Tape:
    """The steps of one construction.

    Args:
        seed: Random values follow from it and the order of the constructor's random steps.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._steps: list[_Step] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._storages = 0
        self._draws = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tape":
        return self  # a copied model's tensors keep their history

    def next_seed(self) -> int:
        """Return the seed of the next random step."""
        self._draws += 1
        return derive_seed(self._seed, "construction", str(self._draws))

    def ref(self, tensor: torch.Tensor) -> _Ref:
        """Return the reference to a tensor on the meta device; a new tensor gets a storage without history."""
        storage = tensor.untyped_storage()
        tape, number = getattr(storage, _MARK, (None, -1))
        if tape is not self:
            self._storages += 1
            if tape is not None:  # built under another tape: its value there is an input here
                self._adopt(tape, _Ref(number, torch.uint8, (storage.nbytes(),), (1,), 0))
            number = self._storages
            setattr(storage, _MARK, (self, number))
        return _Ref(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def add(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
        seed: int | torch.Generator | None = None,
    ) -> None:
        """Record one step.

        Args:
            func: The function that was called.
            args: Its arguments.
            kwargs: Its keyword arguments.
            written: Deferred tensors among them that it changed in place.
            results: Deferred tensors it returned.
            seed: For random steps, see :class:`_Step`.
        """
        reads = [self.ref(leaf).storage for leaf in leaves((args, kwargs)) if is_deferred(leaf)]
        old = frozenset(reads)
        made = tuple(map(self.ref, results))
        for number in {self.ref(tensor).storage for tensor in written} | {ref.storage for ref in made} - old:
            self._writers[number].append(len(self._steps))
        erases = self.ref(written[0]).storage if func in _OVERWRITING and _is_whole(written[0], args) else None
        args, kwargs = mapped(self._keep, (args, kwargs))
        self._steps.append(_Step(func, args, kwargs, old, made, seed, erases))

    def realise(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Compute a deferred tensor.

        The steps run twice, over memory filled with zeros and with ones: a value that comes out different was never
        written by the constructor.

        Returns:
            The value on the CPU in memory of its own, and whether it was drawn at random.

        Raises:
            LoadError: The value depends on memory that nothing has written.
        """
        return self._value(self.ref(tensor))

    def _value(self, ref: _Ref) -> tuple[torch.Tensor, bool]:
        steps = self._history(ref.storage)
        # Neither our own modes nor a caller's `with torch.device(...)` may act here.
        with without_function_modes(), without_dispatch_modes(), torch.no_grad():
            values = [self._run(steps, ref, background) for background in (0, 1)]
        if not _same_bytes(*values):
            raise LoadError(
                "repeating a constructor",
                f"a tensor of shape {list(ref.size)} depends on memory that the constructor never wrote",
                allowed="tensors that the constructor fills, or that the checkpoint holds",
            )
        return values[0], any(step.seed is not None for step in steps)

    def _history(self, storage: int) -> list[_Step]:
        """Return all steps that a storage's content depends on, in order."""
        chosen: set[int] = set()
        walked: defaultdict[int, set[int]] = defaultdict(set)
        todo = [(storage, len(self._steps))]
        while todo:
            number, before = todo.pop()
            writers = self._writers[number]
            for index in sorted((index for index in writers if index < before), reverse=True):
                if index in walked[number]:  # and all that counts below it
                    break
                walked[number].add(index)
                chosen.add(index)
                step = self._steps[index]
                todo += [(read, index) for read in step.reads if read != step.erases]
                if step.erases == number:
                    chosen.add(writers[0])  # where its memory comes from
                    todo += [(read, writers[0]) for read in self._steps[writers[0]].reads]
                    break
        return [self._steps[index] for index in sorted(chosen)]

    @staticmethod
    def _run(steps: list[_Step], wanted: _Ref, background: int) -> torch.Tensor:
        real: dict[int, torch.Tensor] = {}

        def look(leaf: Any) -> Any:
            if not isinstance(leaf, _Ref):
                return leaf
            if leaf.storage not in real:
                raise LoadError(
                    "repeating a constructor",
                    f"a tensor of shape {list(leaf.size)} was on the meta device before the constructor ran",
                    hint="build the whole model with dryfit.meta.build or inside dryfit.meta.on_meta()",
                )
            return _view(real[leaf.storage], leaf)

        for step in steps:
            args, kwargs = mapped(look, (step.args, step.kwargs))
            made = _call(step, args, kwargs)
            if step.func in UNINITIALISED:
                _fill(made, background)
            outputs = [leaf for leaf in leaves(made) if isinstance(leaf, torch.Tensor)]
            for ref, output in zip(step.results, outputs, strict=bool(step.results)):
                if ref.storage not in step.reads:
                    real[ref.storage] = _shaped(output, ref)
        return look(wanted).clone()

    def _keep(self, leaf: Any) -> Any:
        if is_deferred(leaf):
            return self.ref(leaf)
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    def _adopt(self, other: "Tape", ref: _Ref) -> None:
        here = replace(ref, storage=self._storages)
        self._writers[here.storage].append(len(self._steps))
        self._steps.append(_Step(lambda: other._value(ref)[0], (), {}, frozenset(), (here,), None))


def leaves(value: Any) -> list[Any]:
    """List the leaves of an operation's arguments or results, five times faster than torch's pytree, of fewer kinds."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [leaf for item in value.values() for leaf in leaves(item)] if isinstance(value, dict) else [value]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the same structure with each leaf changed."""
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {name: mapped(change, item) for name, item in value.items()}
    return change(value)


def is_deferred(leaf: Any) -> bool:
    """Whether a value is a tensor without memory."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def tape_of(tensor: torch.Tensor) -> Tape | None:
    """Return the tape that recorded a tensor on the meta device; None where none did."""
    return getattr(tensor.untyped_storage(), _MARK, (None, -1))[0]


def _view(base: torch.Tensor, ref: _Ref) -> torch.Tensor:
    view = torch.empty(0, dtype=ref.dtype)
    return view.set_(cast("Any", base.untyped_storage()), ref.offset, ref.size, ref.stride)


def _call(step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if step.seed is None:
        return step.func(*args, **kwargs)
    seed = step.seed
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed.clone_state()
    kwargs = {**kwargs, "generator": generator}
    if isinstance(step.func, OpOverload):
        return step.func(*args, **kwargs)
    # An initialiser of torch: sparse_ draws a part without naming the generator.
    with Draws(torch.Generator().manual_seed(generator.initial_seed() + 1)):
        return step.func(*args, **kwargs)


def _is_whole(written: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a written tensor is all of its storage, and nothing else that is read lies there."""
    storage = written.untyped_storage()
    others = [leaf for leaf in args[1:] if is_deferred(leaf)]
    apart = all(storage_key(leaf) != storage_key(written) for leaf in others)
    return apart and written.is_contiguous() and written.nbytes == storage.nbytes()


def _shaped(output: torch.Tensor, ref: _Ref) -> torch.Tensor:
    """Return a result with the memory layout it had on the meta device."""
    if (output.stride(), output.storage_offset()) == (ref.stride, ref.offset):
        return output
    size = 1 + ref.offset + sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
    flat = torch.empty(max(size, 0), dtype=ref.dtype)
    torch.as_strided(flat, ref.size, ref.stride, ref.offset).copy_(output)
    return flat


def _fill(tensor: torch.Tensor, background: int) -> None:
    """Fill unwritten memory: with zeros, or with bytes of all ones (NaN, -1, True)."""
    raw = torch.empty(0, dtype=torch.uint8).set_(cast("Any", tensor.untyped_storage()))
    raw.fill_(background if tensor.dtype is torch.bool else 255 * background)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous()
    # One element counts as contiguous whatever its stride is, but is no row of bytes then.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
