"""Train one configuration in this process, so that ``breakpoint()`` and a debugger work.

``python -m dryfit.training.in_process REQUEST.json``: what ``dryfit train --in-process`` puts in its own place. Nobody
supervises it: it is not resumed, writes no checkpoint, and a crash is a crash. Test is not read.
"""

import sys
from pathlib import Path

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import DryfitError, InternalError
from dryfit.settings.files import read_model
from dryfit.settings.training_messages import StopReason, TrainRequest
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import Message, Note, Phase, Progress
from dryfit.training.trial_jobs import train

_NEVER_S = 1e12


class TerminalChannel(ChildChannel):
    """Prints the messages of a child to the terminal; every report is answered with go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, wakeup_fifo=None, placed_at_s=0.0)

    def send(self, message: Message) -> None:
        """Print what a person wants to read."""
        match message:
            case Progress(step=step, total_steps=total_steps, loss=loss):
                _say(f"step {step}/{total_steps}, loss {loss}")
            case Phase(name=name, step=step):
                _say(f"step {step}: {name}")
            case Note(text=text):
                _say(text)
            case _:
                pass

    def stop_requested(self) -> StopReason | None:
        """Nobody asks: Ctrl-C is Python's own here."""
        return None

    def report(self, point: MetricPoint, *, timeout_s: float, last: bool = False) -> bool:
        """Print a validation."""
        _say(f"validation {point.n}, step {point.step}: {point.value!r}")
        return True


def main(request_path: Path) -> int:
    """Train, and print the best validation's value.

    Returns:
        The exit status.
    """
    body = read_model(request_path, TrainRequest)
    if body is None:
        raise InternalError("training in this process", f"no request at {request_path}")
    channel = TerminalChannel(request_path.parent)
    channel.send(Phase(name="load"))
    try:
        result = train(body.model_copy(update={"checkpoint_every_s": _NEVER_S}), channel)
    except DryfitError as error:
        _say(f"error: {error}")
        return int(error.exit_status)
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"{result.value!r}\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
