"""The commands ``plan``, ``calibrate`` and ``rehearse``: the memory that trials or anyone's script will take."""

import codecs
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dryfit.cli.options import JsonOption, QuietOption, SetOption, answer, notes
from dryfit.core.errors import ConfigError, ExitStatus
from dryfit.core.settings.choices import BuiltInTask


def plan(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder; its data may be absent.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A study file that comes with dryfit.")] = None,
    task: Annotated[BuiltInTask | None, typer.Option(help="Of the preset, where it is for several.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="rtx4090, a100-80, 24GiB, ...; default: this machine's GPU.")
    ] = None,
    overrides: SetOption = None,
    ladder: Annotated[
        bool | None,
        typer.Option("--ladder/--no-ladder", help="Price every change (slower); default: of a preset, or a refusal."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say whether trials fit a device, without a GPU; exit status 1 where they do not, or it is unknown."""
    import dryfit.api as api

    request = api.plan_input(study, device=device, overrides=overrides or (), preset=preset, task=task)
    if request.searched:
        if ladder is not None:
            raise ConfigError("planning a search space", "--ladder or --no-ladder", "them for a single trial only")
        planned = api.plan_combinations(request, notes(quiet=quiet))
        fits = planned.fits
    else:
        planned = api.plan_trial(request, notes(quiet=quiet), ladder=preset is not None if ladder is None else ladder)
        fits = planned.verdict.fits
    answer(planned, as_json=as_json)
    raise typer.Exit(ExitStatus.DONE if fits else ExitStatus.ANSWER_IS_NO)


def calibrate(
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cuda or cuda:N.")] = "cuda:0",
    quick: Annotated[bool, typer.Option("--quick", help="Measure less.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what training steps take of this machine's GPU, so that plans for it are surer."""
    import dryfit.api as api

    answer(api.calibrate(device, quick=quick, on_note=notes(quiet=quiet)), as_json=as_json)


CONTEXT: Final[dict[str, Any]] = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the script is the script's own, options too; ``-m`` begins the command line of a module."""

_KEPT = 1 << 14
"""Characters of the script's last output that are kept, to find its traceback in."""


_CommandLine = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT ARGS...", help="A script, -m MODULE, torchrun ..., or accelerate launch ..."),
]
_Devices = Annotated[
    list[str] | None,
    typer.Option("--device", metavar="DEVICE", help="rtx4090, a100-80, 24GiB, ...; default: this machine's GPU."),
]
_Ranks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Devices: it runs as rank 0 of so many; default: its launcher's.")
]


def rehearse(
    context: typer.Context,
    command: _CommandLine = None,
    device: _Devices = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to see.")] = 3,
    ranks: _Ranks = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Look for TrainingArguments that fit: each is another rehearsal.")
    ] = False,
    worst_batch: Annotated[
        bool, typer.Option("--worst-batch/--no-worst-batch", help="Train on the largest batch of the data first.")
    ] = True,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the timeline.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="Seconds until the first step.")] = 1800.0,
    keep_caches: Annotated[
        bool, typer.Option("--keep-caches", help="Let what libraries download stay in their caches.")
    ] = False,
    as_json: JsonOption = False,
    with_timeline: Annotated[
        bool, typer.Option("--json-timeline", help="As --json, with memory over time in it.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Run a training script without a GPU, and say where its memory peaks and whether it fits.

    Exit status 1 where it does not fit or that is unknown, 2 where nothing was seen of its memory.
    """
    import dryfit.api as api
    from dryfit.reporting.rehearsals import rehearsal_document, rehearsal_json

    if not command:
        raise ConfigError("rehearsing", "no script was given", "SCRIPT ARGS..., or -m MODULE ARGS...")
    _refuse_mistyped(command[0], context)
    passed = _PassedOn(quiet=quiet)
    options = api.RehearsalOptions(
        device=_one(device),
        steps=steps,
        ranks=ranks,
        worst_batch=worst_batch,
        ladder=ladder,
        timeout_s=timeout,
        keep_caches=keep_caches,
        on_output=passed.add,
        on_note=notes(quiet=quiet),
    )
    interrupted = False
    try:
        seen = api.rehearse_command(api.read_command(command), options)
    except api.RehearsalInterrupted as error:
        seen, interrupted = error.answer, True
    if html is not None:
        api.write_rehearsal(seen, html, " ".join(command))
    if not seen.went_through:
        passed.add_traceback(seen.traceback)
    told = rehearsal_json(seen, with_timeline=with_timeline)
    answer(told, as_json=as_json or with_timeline, document=rehearsal_document(seen, ladder=ladder))
    if interrupted:
        raise typer.Exit(ExitStatus.INTERRUPTED)
    raise typer.Exit(ExitStatus.DONE if seen.fits else ExitStatus.ANSWER_IS_NO if seen.ran else ExitStatus.CANNOT_RUN)


def _one(devices: list[str] | None) -> str | None:
    """Return the device that was named.

    Raises:
        ConfigError: They are several.
    """
    if devices and len(devices) > 1:
        raise ConfigError("rehearsing", f"several devices: {', '.join(devices)}", "one --device; --ranks for several")
    return devices[0] if devices else None


def _refuse_mistyped(word: str, context: typer.Context) -> None:
    """Refuse an option before the script that is nearly one of the command's: unknown ones are taken for the script's.

    Raises:
        ConfigError: It is one, and ``-m`` it is not.
    """
    name = word.partition("=")[0]
    known = [option for one in context.command.params for option in (*one.opts, *one.secondary_opts)]
    near = get_close_matches(name, known, n=1) if name.startswith("--") and name not in known else []
    if near:
        raise ConfigError(
            "rehearsing", f"there is no option {name}", "an option of rehearse", f"did you mean {near[0]}?"
        )


class _PassedOn:
    """Writes what the script prints on stderr, as it is: it is the user's own terminal, and progress bars move in it.

    Args:
        quiet: Write nothing but the traceback of a script that failed.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._last = ""

    def add(self, data: bytes) -> None:
        """Write what has come."""
        text = self._decoder.decode(data)
        if text and not self._quiet:
            self._last = (self._last + text)[-_KEPT:]
            self._write(text)

    def add_traceback(self, traceback: str) -> None:
        """Write a traceback, unless the script has printed it already."""
        lines = traceback.rstrip().splitlines()
        if lines and lines[-1] not in self._last:
            self._write("\n".join((*lines, "")))

    @staticmethod
    def _write(text: str) -> None:
        getattr(sys.stderr, "write_raw", sys.stderr.write)(text)
        sys.stderr.flush()
