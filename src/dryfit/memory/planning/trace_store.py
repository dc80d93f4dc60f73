"""Traces on disk, shared by all processes and studies: one file for each segment, fit and answer.

A trace's file is an ``.npz`` of plain columns (nothing is unpickled) and a header in JSON. It is written in one step
and never changed, so readers need no lock. A file that is torn, foreign or of another version counts as absent.
"""

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dryfit.core.jobs.memory import MemoryCategory, MemoryPlan, StepPhase
from dryfit.core.settings.tables import Settings
from dryfit.core.sharding.shard_summary import Sent
from dryfit.core.version import PACKAGE_FOLDER
from dryfit.core.wire import canonical_json
from dryfit.memory.planning.interpolate import FitPlan, Regime, SegmentFit, regime
from dryfit.memory.tracing.events import Label, Segment, SegmentKind, Shape
from dryfit.memory.tracing.tracer import Variant

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


def code_fingerprint(package: Path) -> str:
    """Hash the Python sources below a folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
