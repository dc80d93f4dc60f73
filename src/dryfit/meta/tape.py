"""What constructors do to tensors without memory: written down, and done again for real where it is needed.

While a :class:`Recorder` is active in a thread, an uninitialised allocation gives a tensor on the meta device, and
every operation on such a tensor is written on the :class:`Tape`. :meth:`Tape.realise` repeats just the steps that lead
to one tensor. The idea of a deferred initialisation is torchdistx's (``torchdistx.deferred_init``); here values that a
constructor *computes* are never deferred, so that it may read them.

A tensor is named by the number of its storage on the tape, which is kept on the storage object itself: it survives
wrapping in a Parameter, views and ties, and needs no table that could outlive the model.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from dryfit.core.errors import LoadError
from dryfit.core.seeds import derive_seed
from dryfit.meta.drawing import Draws, drawing, takes

DEFERRED_ABOVE_BYTES = 64 << 20
"""Results of this size and more are computed when they are needed, not when the constructor asks for them."""

_MARK = "_dryfit_birth"
_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_permuted.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
# What replaces every element it is given, whatever was there.
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
    """A tensor of the tape: a storage by its number, and how to look at it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation; tensors without memory are :class:`_Ref`, all others are copies taken when it ran.

    Attributes:
        reads: Storages it looks at; those it writes to in place are among them.
        results: Deferred tensors it returned; those in storages it did not read are new.
        seed: What a random operation draws with; None for the others.
        erases: The storage whose whole content it replaces; what was written there before no longer counts.
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
        seed: Makes random values a function of it and of the order of the constructor's random steps.
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
        """The seed of the next random step."""
        self._draws += 1
        return derive_seed(self._seed, "construction", str(self._draws))

    def ref(self, tensor: torch.Tensor) -> _Ref:
        """The name of a tensor on the meta device; one never seen before gets a storage without history."""
        storage = tensor.untyped_storage()
        tape, number = getattr(storage, _MARK, (None, -1))
        if tape is not self:
            self._storages += 1
            if tape is not None:  # built under another tape: what that one knows of it is a value here
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
        """Write down one step.

        Args:
            func: What was called.
            args: Its arguments.
            kwargs: Its keyword arguments.
            written: Deferred tensors among them that it changed in place.
            results: Deferred tensors it returned.
            seed: For random steps, see :class:`_Step`.
        """
        reads = [self.ref(leaf).storage for leaf in tree_flatten((args, kwargs))[0] if is_deferred(leaf)]
        old = frozenset(reads)
        made = tuple(map(self.ref, results))
        for number in {self.ref(tensor).storage for tensor in written} | {ref.storage for ref in made} - old:
            self._writers[number].append(len(self._steps))
        erases = self.ref(written[0]).storage if func in _OVERWRITING and _is_whole(written[0], args) else None
        args, kwargs = tree_map(self._keep, (args, kwargs))
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
        # Neither our own modes nor a `with torch.device(...)` around the caller may see this.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            values = [self._run(steps, ref, background) for background in (0, 1)]
        if not _same_bytes(*values):
            raise LoadError(
                "repeating a constructor",
                f"a tensor of shape {list(ref.size)} depends on memory that the constructor never wrote",
                allowed="tensors that the constructor fills, or that the checkpoint holds",
            )
        return values[0], any(step.seed is not None for step in steps)

    def _history(self, storage: int) -> list[_Step]:
        """All steps a storage's content depends on, in order."""
        chosen: set[int] = set()
        looked: dict[int, int] = {}
        todo = [(storage, len(self._steps))]
        while todo:
            number, before = todo.pop()
            if looked.get(number, 0) >= before:
                continue
            looked[number] = before
            writers = self._writers[number]
            for index in sorted((index for index in writers if index < before), reverse=True):
                step = self._steps[index]
                chosen.add(index)
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
            args, kwargs = tree_map(look, (step.args, step.kwargs))
            made = _call(step, args, kwargs)
            if step.func in _UNINITIALISED:
                _fill(made, background)
            outputs = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, torch.Tensor)]
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


class Recorder(TorchDispatchMode):
    """Sends uninitialised allocations of this thread to the meta device and writes down what happens to them.

    Args:
        tape: Where it writes.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        written = _written(func, args, kwargs)
        deferred = [leaf for leaf in tree_flatten((args, kwargs))[0] if is_deferred(leaf)]
        if any(not is_deferred(tensor) for tensor in written):
            return self._for_real(func, args, kwargs)
        if not deferred and func not in _UNINITIALISED and not _may_be_large(func):
            return self._for_real(func, args, kwargs)
        try:
            result = self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError):  # it looks at values, or meta does not know it
            if not written:
                return self._for_real(func, args, kwargs)
            result = written[0] if len(written) == 1 else tuple(written)
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        if not deferred and not self._defers(func, results):
            return self._for_real(func, args, kwargs)
        self._write_down(func, args, kwargs, written, results)
        return result

    @staticmethod
    def _defers(func: Any, results: list[torch.Tensor]) -> bool:
        size_bytes = sum(tensor.untyped_storage().nbytes() for tensor in results)
        return size_bytes > 0 if func in _UNINITIALISED else size_bytes >= DEFERRED_ABOVE_BYTES

    def _write_down(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        func, kwargs, seed = self._seeded(func, _placed(func, kwargs, _CPU))
        if isinstance(seed, torch.Generator):
            # A generator of the constructor's own: it must go on as if it had drawn.
            state = seed.clone_state()
            scratch = [torch.empty_like(t, device=_CPU) if is_deferred(t) else t for t in args]
            func(*scratch, **kwargs)
            kwargs, seed = {**kwargs, "generator": None}, state
        elif seed is not None:
            kwargs = {**kwargs, "generator": None}
        self.tape.add(func, args, kwargs, written, results, seed)

    def _for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on the CPU, with the values of deferred arguments."""
        args, kwargs = tree_map(lambda leaf: self.tape.realise(leaf)[0] if is_deferred(leaf) else leaf, (args, kwargs))
        func, kwargs, seed = self._seeded(func, _placed(func, kwargs, _CPU))
        if isinstance(seed, int):
            kwargs = {**kwargs, "generator": torch.Generator().manual_seed(seed)}
        return func(*args, **kwargs)

    @staticmethod
    def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            raise NotImplementedError
        args, kwargs = tree_map(_without_data, (args, kwargs))
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        return func(*args, **_placed(func, kwargs, _META))

    def _seeded(self, func: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], int | torch.Generator | None]:
        """A random operation with a seed of its own: the process's global generator is neither read nor moved."""
        if kwargs.get("generator") is not None:
            return func, kwargs, kwargs["generator"]
        drawn = drawing(func, kwargs)
        return (func, kwargs, None) if drawn is None else (drawn, kwargs, self.tape.next_seed())


def is_deferred(leaf: Any) -> bool:
    """Whether something is a tensor without memory."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def tape_of(tensor: torch.Tensor) -> Tape | None:
    """The tape that knows how a tensor on the meta device was made; None where nobody wrote it down."""
    return getattr(tensor.untyped_storage(), _MARK, (None, -1))[0]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an operation changes in place."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return found


def _may_be_large(func: Any) -> bool:
    """Whether an operation makes new memory; views, changes in place and reads of a value do not."""
    schema = func._schema
    makes = any(str(result.type).endswith(("Tensor", "Tensor[]")) for result in schema.returns)
    return makes and not schema.is_mutable and not func.is_view


def _placed(func: Any, kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Keyword arguments with the device we want in place of the one asked for."""
    if not takes(func, "device"):
        return kwargs
    kept = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return {**kept, "device": device}


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or is_deferred(leaf):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)


def _view(base: torch.Tensor, ref: _Ref) -> torch.Tensor:
    view = torch.empty(0, dtype=ref.dtype)
    return view.set_(cast("Any", base.untyped_storage()), ref.offset, ref.size, ref.stride)


def _call(step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if step.seed is None:
        return step.func(*args, **kwargs)
    seed = step.seed
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed.clone_state()
    kwargs = {**kwargs, "generator": generator}
    if isinstance(step.func, torch._ops.OpOverload):
        return step.func(*args, **kwargs)
    # An initialiser of torch: sparse_ draws a part without naming the generator.
    with Draws(torch.Generator().manual_seed(generator.initial_seed() + 1)):
        return step.func(*args, **kwargs)


def _is_whole(written: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a written tensor is all of its storage, and nothing else that is read lies there."""
    storage = written.untyped_storage()
    others = [leaf for leaf in args[1:] if is_deferred(leaf)]
    apart = all(leaf.untyped_storage()._cdata != storage._cdata for leaf in others)
    return apart and written.is_contiguous() and written.nbytes == storage.nbytes()


def _shaped(output: torch.Tensor, ref: _Ref) -> torch.Tensor:
    """A result whose memory is laid out as it was on the meta device."""
    if (output.stride(), output.storage_offset()) == (ref.stride, ref.offset):
        return output
    room = 1 + ref.offset + sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
    flat = torch.empty(max(room, 0), dtype=ref.dtype)
    torch.as_strided(flat, ref.size, ref.stride, ref.offset).copy_(output)
    return flat


def _fill(tensor: torch.Tensor, background: int) -> None:
    """Fill memory that nobody has written: with zeros, or with bytes of all ones (NaN, -1, True)."""
    raw = torch.empty(0, dtype=torch.uint8).set_(cast("Any", tensor.untyped_storage()))
    raw.fill_(background if tensor.dtype is torch.bool else 255 * background)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
