"""Traces on disk, shared by all processes and studies, and segments interpolated from a few of them."""

import hashlib
import io
import os
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dryfit.gpu.events import Label, Segment, SegmentKind, Shape
from dryfit.plans.timeline import peak_bytes
from dryfit.plans.tracer import Variant
from dryfit.settings.execution import MemoryPlan
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.sharding import Sent
from dryfit.settings.tables import Settings
from dryfit.settings.version import PACKAGE_FOLDER, code_fingerprint
from dryfit.settings.wire import canonical_json

# Interpolate segments: polynomials through traces of a few batch shapes give the others, checked against a trace.
#
# Every tensor of a training step has a size that is a polynomial in rows ``B`` and padded length ``L``, with terms
# among ``1, B, L, B*L, L*L, B*L*L``, as long as the same operators run. So the segments at two ``B`` and three ``L``
# determine all others; within one length those at two ``B`` do. Which operators run may change with the shape: a fit
# holds for one regime only, demands the same events in all its traces and is compared with traces that it was not
# made from.


_MASK_ALIGNMENT = 8
_KERNEL_TOKENS = (1024, 3072)
"""Above so many rows the backward kernels of layer norms and of embeddings take memory for themselves
(``aten/src/ATen/native/cuda``: ``layer_norm_kernel.cu``, ``Embedding.cu``)."""
TOLERANCE = 1e-3
"""Most a fit's peak may differ from a trace's, relatively."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Shapes in which the same operators run.

    Attributes:
        residue: Length modulo 8: attention masks are padded to 16 bytes.
        one_row: With one row, dimensions of size one take other paths.
        tokens: How many kernels' thresholds the tokens of a batch exceed.
        positions: The same for the tokens of one row.
    """

    residue: int
    one_row: bool
    tokens: int
    positions: int


def regime(shape: Shape) -> Regime:
    """Return the regime of a shape."""
    tokens, positions = (bisect_left(_KERNEL_TOKENS, count) for count in (shape.rows * shape.length, shape.length))
    return Regime(shape.length % _MASK_ALIGNMENT, shape.rows == 1, tokens, positions)


@dataclass(frozen=True, slots=True)
class FitPlan:
    """The shapes to trace for a fit.

    Attributes:
        rows: Rows to trace at: two, or one.
        lengths: Lengths to trace at: three, or one.
        checks: Shapes to compare the fit with.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    checks: tuple[Shape, ...]

    @property
    def nodes(self) -> tuple[Shape, ...]:
        """The shapes that make the fit."""
        return tuple(Shape(rows, length) for rows, length in product(self.rows, self.lengths))


def plan_fits(shape: Shape, asked: Iterable[Shape], traced: Iterable[Shape] = ()) -> tuple[FitPlan, ...]:
    """Return the fits that need fewer traces than all shapes asked for, the one that saves most first.

    Args:
        shape: Each fit must cover it.
        asked: All shapes that will be asked for.
        traced: Those that need no new trace.
    """
    wanted_regime = regime(shape)
    wanted = {other for other in asked if regime(other) == wanted_regime} | {shape}
    known = {other for other in traced if regime(other) == wanted_regime}
    plans = [plan for plan in (_plan_rows(shape, wanted), _plan_grid(wanted)) if plan is not None]

    def saved(plan: FitPlan) -> int:
        covered = {other for other in wanted if len(plan.lengths) > 1 or other.length in plan.lengths}
        return len(covered - known) - len({*plan.nodes, *plan.checks} - known)

    return tuple(sorted((plan for plan in plans if saved(plan) > 0), key=saved, reverse=True))


def _plan_rows(shape: Shape, wanted: set[Shape]) -> FitPlan | None:
    rows = sorted({other.rows for other in wanted if other.length == shape.length})
    if len(rows) < 4:  # two make the fit and one checks it
        return None
    middle = rows[len(rows) // 2]
    return FitPlan((rows[0], rows[-1]), (shape.length,), (Shape(middle, shape.length),))


def _plan_grid(wanted: set[Shape]) -> FitPlan | None:
    lengths = sorted({other.length for other in wanted})
    rows = _grid_rows(wanted)
    if len(lengths) < 3 or rows is None:
        return None
    nodes = FitPlan(rows, (lengths[0], lengths[len(lengths) // 2], lengths[-1]), ())
    if len({regime(node) for node in nodes.nodes}) > 1:
        return None
    others = sorted(wanted - set(nodes.nodes), key=lambda other: (other.rows, other.length))
    if not others:
        return None
    # One with the fewest rows, which may lie below the nodes, and one from the middle.
    return replace(nodes, checks=tuple(dict.fromkeys((others[0], others[len(others) // 2]))))


def _grid_rows(wanted: set[Shape]) -> tuple[int, ...] | None:
    """The fewest and most rows that are in the regime at the smallest length too; nobody need ask for them."""
    shortest = min(other.length for other in wanted)
    fewest, most = min(other.rows for other in wanted), max(other.rows for other in wanted)
    mine = regime(next(iter(wanted)))
    fit_rows = [rows for rows in range(fewest, most + 1) if regime(Shape(rows, shortest)) == mine]
    if mine.one_row:
        return (1,)
    return (fit_rows[0], most) if len(fit_rows) > 1 and fit_rows[-1] == most else None


@dataclass(frozen=True, slots=True)
class SegmentFit:
    """Segments of one kind in one regime.

    Attributes:
        plan: The shapes it was made from and compared with.
        template: The segment at the first node.
        sizes: Bytes of each block at each node, nodes by blocks.
    """

    plan: FitPlan
    template: Segment
    sizes: NDArray[np.int64]

    def covers(self, shape: Shape) -> bool:
        """Whether the fit holds for a shape: one in its regime and not above its nodes."""
        rows, lengths = self.plan.rows, self.plan.lengths
        return (
            regime(shape) == regime(self.plan.nodes[0])
            and (shape.rows <= max(rows) if len(rows) > 1 else shape.rows in rows)
            and (shape.length <= max(lengths) if len(lengths) > 1 else shape.length in lengths)
        )

    def at(self, shape: Shape) -> Segment | None:
        """Return the segment at a shape; None where the fit does not cover it, or some size would not be positive."""
        if not self.covers(shape):
            return None
        along_rows = _lagrange(self.plan.rows, shape.rows)
        along_lengths = _lagrange(self.plan.lengths, shape.length)
        weights = np.array([float(b * length) for b, length in product(along_rows, along_lengths)])
        sizes = np.rint(weights @ self.sizes).astype(np.int64)
        if len(sizes) and sizes.min() <= 0:
            return None
        deltas = sizes[np.asarray(self.template.blocks)] * np.sign(np.asarray(self.template.deltas))
        return replace(self.template, deltas=deltas.tolist())


def _lagrange(nodes: Sequence[int], at: int) -> list[Fraction]:
    """Weights of the values at ``nodes`` in the value at ``at`` of the polynomial through them."""
    weights: list[Fraction] = []
    for node in nodes:
        weight = Fraction(1)
        for other in nodes:
            if other != node:
                weight *= Fraction(at - other, node - other)
        weights.append(weight)
    return weights


def fit(plan: FitPlan, traces: Mapping[Shape, Segment]) -> SegmentFit | None:
    """Fit the sizes of all events.

    Args:
        plan: Which traces make the fit and which check it.
        traces: A segment for each of them.

    Returns:
        None where the traces differ in more than sizes, or the fit misses a check by more than 0.1 %.
    """
    ordered = [in_canonical_order(traces[shape]) for shape in plan.nodes]
    structure = _structure(ordered[0])
    if any(_structure(segment) != structure for segment in ordered[1:]):
        return None
    fitted = SegmentFit(plan, ordered[0], np.stack([_block_sizes(segment) for segment in ordered]))
    for shape in plan.checks:
        guess = fitted.at(shape)
        if guess is None or _structure(in_canonical_order(traces[shape])) != structure:
            return None
        true_bytes = peak_bytes(traces[shape])
        if abs(peak_bytes(guess) - true_bytes) > TOLERANCE * true_bytes:
            return None
    return fitted


def in_canonical_order(segment: Segment) -> Segment:
    """Return the segment with each unbroken run of frees in a fixed order, and blocks renumbered.

    Python's garbage collector may free blocks in another order from trace to trace; no peak depends on it.
    """
    taken_at = {
        block: at for at, (block, size) in enumerate(zip(segment.blocks, segment.deltas, strict=True)) if size > 0
    }
    run_of = np.cumsum(np.asarray(segment.deltas, dtype=np.int64) > 0).tolist()
    order = sorted(
        range(len(segment.deltas)),
        key=lambda at: (
            run_of[at],
            segment.deltas[at] < 0,
            taken_at.get(segment.blocks[at], -1),
            segment.names.get(segment.blocks[at], "") if segment.blocks[at] not in taken_at else "",
        ),
    )
    numbers: dict[int, int] = {}
    for at in order:
        numbers.setdefault(segment.blocks[at], len(numbers))
    return Segment(
        blocks=[numbers[segment.blocks[at]] for at in order],
        deltas=[segment.deltas[at] for at in order],
        labels=[segment.labels[at] for at in order],
        label_table=segment.label_table,
        names={numbers[block]: name for block, name in segment.names.items()},
        gemm_at=segment.gemm_at,
        bias_at=segment.bias_at,
    )


def _structure(segment: Segment) -> tuple[object, ...]:
    """Return all of a segment but sizes and the labels of frees."""
    signs = tuple(size > 0 for size in segment.deltas)
    takers: tuple[Label | None, ...] = tuple(
        segment.label_table[label] if taken else None for label, taken in zip(segment.labels, signs, strict=True)
    )
    return (
        tuple(segment.blocks),
        signs,
        takers,
        tuple(sorted(segment.names.items())),
        tuple(sorted(segment.gemm_at.items())),
        segment.bias_at,
    )


def _block_sizes(segment: Segment) -> NDArray[np.int64]:
    """Bytes of each block."""
    sizes = np.zeros(max(segment.blocks, default=-1) + 1, dtype=np.int64)
    sizes[np.asarray(segment.blocks, dtype=np.int64)] = np.abs(np.asarray(segment.deltas, dtype=np.int64))
    return sizes


# Traces on disk, shared by all processes and studies: one file for each segment, fit and answer.
#
# A trace's file is an ``.npz`` of plain columns (nothing is unpickled) and a header in JSON. It is written in one
# step and never changed, so readers need no lock. A file that is torn, foreign or of another version counts as
# absent.


_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
"""Errors of reading a file of any content; a header that does not validate is a ValueError too."""
_T = TypeVar("_T")

DEFAULT_LIMIT_BYTES = 512 * 2**20


class _Header(Settings):
    """A segment without its columns; ``rows``, ``lengths`` and ``checks`` are set for a fit."""

    format: Literal[1] = 1
    identity: str
    labels: tuple[tuple[StepPhase, MemoryCategory, str, str], ...]
    names: dict[int, str]
    gemm_at: dict[StepPhase, int]
    bias_at: int | None = None
    rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    checks: tuple[tuple[int, int], ...] = ()


class _Answer(Settings):
    """A question and its answer: a plan, or what a rank sends."""

    format: Literal[1] = 1
    question: str
    plan: MemoryPlan | None = None
    sent: Sent | None = None


@dataclass(frozen=True, slots=True)
class TraceStore:
    """A folder of recorded traces.

    Attributes:
        folder: Made where it is missing.
        code: Identifies the code that traces and plans; records of other code are not used.
        limit_bytes: The files used longest ago are dropped beyond it.
    """

    folder: Path
    code: str = ""
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @staticmethod
    def of_this_code(folder: Path) -> "TraceStore":
        """Return a store whose records are dropped with the next change of dryfit's code."""
        return TraceStore(folder, code_fingerprint(PACKAGE_FOLDER))

    def segment(self, key: str, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment | None:
        """Return a recorded trace; None where there is none."""
        return self._read(_identity(key, kind, variant, shape), _segment)

    def put_segment(self, segment: Segment, key: str, kind: SegmentKind, variant: Variant, shape: Shape | None) -> None:
        """Record a trace."""
        self._write(_header(segment, _identity(key, kind, variant, shape)), _columns(segment))

    def fit(self, key: str, kind: SegmentKind, variant: Variant, of: Regime, length: int | None) -> SegmentFit | None:
        """Return a recorded fit of a regime; ``length``: of a fit at that one length."""
        return self._read(_identity(key, kind, variant, of, length), _fit)

    def put_fit(self, fit: SegmentFit, key: str, kind: SegmentKind, variant: Variant) -> None:
        """Record a fit."""
        lengths = fit.plan.lengths
        identity = _identity(key, kind, variant, regime(fit.plan.nodes[0]), lengths[0] if len(lengths) == 1 else None)
        self._write(_header(fit.template, identity, fit.plan), _columns(fit.template) | {"sizes": fit.sizes})

    def plan(self, question: str) -> MemoryPlan | None:
        """Return the recorded plan for a question; None where there is none."""
        answer = self._answer(question)
        return answer.plan if answer is not None else None

    def put_plan(self, plan: MemoryPlan, question: str) -> None:
        """Record the plan for a question."""
        self._put_answer(_Answer(question=question, plan=plan))

    def sent(self, question: str) -> Sent | None:
        """Return what a rank sends, as it was counted earlier; None where it was not."""
        answer = self._answer(f"sent {question}")
        return answer.sent if answer is not None else None

    def put_sent(self, sent: Sent, question: str) -> None:
        """Record what a rank sends."""
        self._put_answer(_Answer(question=f"sent {question}", sent=sent))

    def _answer(self, question: str) -> _Answer | None:
        path = self._path(question, ".json")
        try:
            answer = _Answer.model_validate_json(path.read_bytes())
            os.utime(path)
        except _UNREADABLE:
            return None
        return answer if answer.question == question else None

    def _put_answer(self, answer: _Answer) -> None:
        self._write_bytes(self._path(answer.question, ".json"), answer.model_dump_json().encode())

    def _path(self, identity: str, suffix: str = ".npz") -> Path:
        digest = hashlib.sha256(f"{self.code}\n{identity}".encode()).hexdigest()
        return self.folder / (digest[:40] + suffix)

    def _read(self, identity: str, parse: Callable[[_Header, Mapping[str, NDArray[Any]]], _T]) -> _T | None:
        path = self._path(identity)
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            header = _Header.model_validate_json(columns.pop("header").tobytes())
            parsed = parse(header, columns)
            os.utime(path)
        except _UNREADABLE:
            return None
        return parsed if header.identity == identity else None

    def _write(self, header: _Header, columns: Mapping[str, NDArray[Any]]) -> None:
        buffer = io.BytesIO()
        text = np.frombuffer(header.model_dump_json().encode(), dtype=np.uint8)
        np.savez(buffer, header=text, **columns)  # pyright: ignore[reportArgumentType]
        self._write_bytes(self._path(header.identity), buffer.getbuffer())

    def _write_bytes(self, path: Path, data: bytes | memoryview) -> None:
        """Write a file in one step. A full or read-only disk only costs the next reader a trace of its own."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
            self._drop_oldest(keep=path)

    def _drop_oldest(self, *, keep: Path) -> None:
        files: list[tuple[int, int, Path]] = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # another process drops files too
                about = entry.stat()
                files.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
        excess_bytes = sum(size for _, size, _ in files) - self.limit_bytes
        for _, size, path in sorted(files):
            if excess_bytes <= 0:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                excess_bytes -= size


def _identity(
    key: str, kind: SegmentKind, variant: Variant, at: Shape | Regime | None, length: int | None = None
) -> str:
    match at:
        case Shape():
            place = ("shape", at.rows, at.length)
        case Regime():
            place = ("fit", *astuple(at), length)
        case None:
            place = ()
    choices = (
        variant.checkpointing,
        variant.optimizer_impl.value,
        variant.offload_optimizer,
        variant.chunked_loss,
        variant.offload_activations,
    )
    return canonical_json([key, kind.value, choices, place])


def _header(segment: Segment, identity: str, plan: FitPlan | None = None) -> _Header:
    return _Header(
        identity=identity,
        labels=tuple((label.phase, label.category, label.module, label.op) for label in segment.label_table),
        names=dict(segment.names),
        gemm_at=dict(segment.gemm_at),
        bias_at=segment.bias_at,
        rows=plan.rows if plan else (),
        lengths=plan.lengths if plan else (),
        checks=tuple((shape.rows, shape.length) for shape in plan.checks) if plan else (),
    )


def _columns(segment: Segment) -> dict[str, NDArray[Any]]:
    return {
        "blocks": np.asarray(segment.blocks, dtype=np.int32),
        "deltas": np.asarray(segment.deltas, dtype=np.int64),
        "labels": np.asarray(segment.labels, dtype=np.int32),
    }


def _segment(header: _Header, columns: Mapping[str, NDArray[Any]]) -> Segment:
    return Segment(
        blocks=columns["blocks"].tolist(),
        deltas=columns["deltas"].tolist(),
        labels=columns["labels"].tolist(),
        label_table=tuple(Label(*label) for label in header.labels),
        names=header.names,
        gemm_at=header.gemm_at,
        bias_at=header.bias_at,
    )


def _fit(header: _Header, columns: Mapping[str, NDArray[Any]]) -> SegmentFit:
    plan = FitPlan(header.rows, header.lengths, tuple(Shape(rows, length) for rows, length in header.checks))
    return SegmentFit(plan, _segment(header, columns), columns["sizes"])
