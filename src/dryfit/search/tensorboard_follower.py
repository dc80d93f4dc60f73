"""TensorBoard: a folder for each trial, whose file of events is a function of the trial's part of the ledger.

A file is only appended to where it is the beginning of what is wanted, so a write that was cut short is completed by
the next; any other file is replaced.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

from dryfit.search.follower_runs import Fact, Run, Runs, RunWriter
from dryfit.search.followers import client
from dryfit.settings.trial import Outcome, Scalar

_STATUS = {None: 3, Outcome.COMPLETE: 1, Outcome.FAILED: 2}
"""Of a session in hparams' api.proto: STATUS_SUCCESS 1, STATUS_FAILURE 2, STATUS_RUNNING 3; others are unknown, 0."""


class TensorBoardFiles(RunWriter):
    """Writes folders of events.

    Args:
        folder: The log directory; each study has a folder of its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[int, tuple[int, int]] = {}
        writer: Any = client("tensorboard", ".summary.writer.record_writer")
        self._record_writer: Any = writer.RecordWriter
        self._event: Any = client("tensorboard", ".compat.proto.event_pb2").Event
        self._summary: Any = client("tensorboard", ".compat.proto.summary_pb2").Summary
        self._text: Any = client("tensorboard", ".plugins.text.metadata")
        self._api: Any = client("tensorboard", ".plugins.hparams.api_pb2")
        self._plugin: Any = client("tensorboard", ".plugins.hparams.plugin_data_pb2")
        self._hparams: Any = client("tensorboard", ".plugins.hparams.metadata")

    def identity(self) -> str:
        """Return the folder, and which one it is: a deleted one is written anew."""
        self._folder.mkdir(parents=True, exist_ok=True)
        facts = self._folder.stat()
        return f"{self._folder} {facts.st_dev}:{facts.st_ino}"

    def write(self, runs: Runs, numbers: list[int]) -> None:
        """Write what the files lack of these trials."""
        for number in numbers:
            run = runs.runs[number]
            file = self._folder / runs.folder / run.name / f"events.out.tfevents.{int(run.trial.asked_at_s)}.dryfit"
            size, points = self._written.get(number, (0, 0))
            if size and file.exists() and file.stat().st_size == size:
                more = self._content(runs, run, points)
                with file.open("ab") as stream:
                    stream.write(more)
                size += len(more)
            else:
                size = _complete(file, self._content(runs, run))
            self._written[number] = (size, len(run.points))
            if run.ended:
                del self._written[number]

    def _content(self, runs: Runs, run: Run, after: int | None = None) -> bytes:
        """Return the records of a run, all or those that come after so many points."""
        buffer = BytesIO()
        records, trial = self._record_writer(buffer), run.trial

        def add(at_s: float, step: int = 0, **content: Any) -> None:
            event = self._event(wall_time=at_s, step=step, **content)
            records.write(event.SerializeToString(deterministic=True))

        if after is None:
            add(trial.asked_at_s, file_version="brain.Event:2")
            add(trial.asked_at_s, summary=self._start(runs, run))
        for point in run.points[after or 0 :]:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in point.values.items()]
            add(point.at_s, point.step, summary=self._summary(value=values))
        if run.ended:
            at_s = trial.finished_at_s or trial.asked_at_s
            values = [self._summary.Value(tag=f"end/{key}", simple_value=value) for key, value in run.numbers.items()]
            add(at_s, trial.steps_done, summary=self._summary(value=[*values, self._table(run.facts)]))
            end = self._plugin.SessionEndInfo(status=_STATUS.get(trial.outcome, 0), end_time_secs=at_s)
            add(at_s, summary=self._hparam("_hparams_/session_end_info", session_end_info=end))
        records.flush()
        return buffer.getvalue()

    def _start(self, runs: Runs, run: Run) -> Any:
        at_s = run.trial.asked_at_s
        info = self._plugin.SessionStartInfo(group_name=run.name, start_time_secs=at_s, model_uri=runs.folder)
        for key, value in run.params.items():
            _set(info.hparams[key], value)
        return self._hparam("_hparams_/session_start_info", session_start_info=info)

    def _hparam(self, tag: str, **data: Any) -> Any:
        metadata = self._hparams.create_summary_metadata(self._plugin.HParamsPluginData(**data))
        # Maps are in the order of a hash, which each process seeds anew: a torn file could not be completed.
        content = self._plugin.HParamsPluginData.FromString(metadata.plugin_data.content)
        metadata.plugin_data.content = content.SerializeToString(deterministic=True)
        return self._summary(value=[self._summary.Value(tag=tag, metadata=metadata, tensor=self._hparams.NULL_TENSOR)])

    def _table(self, facts: dict[str, Fact]) -> Any:
        rows = "".join(f"| {key} | {str(value).replace('|', chr(0x2502))} |\n" for key, value in facts.items())
        value = self._summary.Value(tag="end/facts")
        value.metadata.CopyFrom(self._text.create_summary_metadata(display_name="facts", description=""))
        value.tensor.dtype = 7  # DT_STRING of TensorFlow's types.proto
        value.tensor.string_val.append(f"| | |\n|---|---|\n{rows}".encode())
        return value


def _complete(file: Path, wanted: bytes) -> int:
    """Make a file hold what is wanted; return its size. One that is being read is only appended to, if that does it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = file.read_bytes() if file.exists() else b""
    if wanted.startswith(known):
        with file.open("ab") as stream:
            stream.write(wanted[len(known) :])
    else:
        part = file.with_name(f".{file.name}.part")
        part.write_bytes(wanted)
        part.replace(file)
    return len(wanted)


def _set(slot: Any, value: Scalar) -> None:
    """Put a value into a ``google.protobuf.Value``."""
    if isinstance(value, bool):
        slot.bool_value = value
    elif isinstance(value, int | float):
        slot.number_value = value
    else:
        slot.string_value = "" if value is None else value
