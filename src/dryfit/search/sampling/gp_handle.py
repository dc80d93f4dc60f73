"""Ask a process of its own for the suggestions of Gaussian processes: they need torch, which is not imported here.

Every wait has a limit. A process that dies, hangs or answers nonsense is ended, and another one is asked once more.
"""

import os
from collections.abc import Mapping
from contextlib import suppress

from pydantic import Field

from dryfit.core.helper import Answering, python_command
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Scalar
from dryfit.core.text.secrets import public_environment
from dryfit.core.wire import Wire

ANSWER_S = 60.0
"""Longest wait for an answer, and for the imports before the first. Usual is a second."""

_TRIES = 2
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class GpTrial(Wire):
    """A trial that the process learns from."""

    params: dict[str, Scalar]
    values: tuple[float, ...] = Field(default=(), description="its value for each goal; empty: it runs")
    excess: float | None = Field(default=None, description="share of the device by which it exceeds its memory")


class GpQuestion(Wire):
    """Everything that a suggestion depends on."""

    space: dict[str, str] = Field(description="Optuna's JSON of each distribution, by internal name")
    directions: tuple[Direction, ...]
    trials: tuple[GpTrial, ...]
    seed: int


class GpAnswer(Wire):
    """The suggested values, or why there are none."""

    params: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    trouble: str = ""


class GpProcess:
    """The process; it is started by the first question and kept for the next ones.

    Args:
        command: What is started instead, in tests.
        answer_s: Longest wait for an answer.
    """

    def __init__(self, command: tuple[str, ...] = (), answer_s: float = ANSWER_S) -> None:
        self._trouble = ""
        module = python_command("dryfit.search.sampling.gp_process", "--parent", str(os.getpid()))
        environment = {**public_environment(os.environ), **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
        self._process = Answering(command or module, environment=environment, answer_s=answer_s)

    def __enter__(self) -> "GpProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def warm(self) -> None:
        """Start the process before its first question."""
        with suppress(OSError):  # the question will tell
            self._process.start()

    def ask(self, question: GpQuestion) -> Mapping[str, Scalar] | None:
        """Return the suggested values; None where two processes gave none."""
        troubles: list[str] = []
        for _ in range(_TRIES):
            try:
                answer = GpAnswer.model_validate_json(self._process.ask(question.model_dump_json()))
            except (OSError, ValueError) as error:  # it could not start, is silent, has died, or answers nonsense
                answer = GpAnswer(trouble=" ".join(str(error).split())[:200])
            if answer.params.keys() == question.space.keys():
                return answer.params
            self.end()
            troubles.append(answer.trouble or "it answered something else")
        self._trouble = f"the Gaussian process gave no suggestion ({'; then '.join(dict.fromkeys(troubles))})"
        return None

    def take_trouble(self) -> str:
        """Return once why a question had no answer, in words; empty: each had one."""
        trouble, self._trouble = self._trouble, ""
        return trouble

    def end(self) -> None:
        """End the process."""
        self._process.end()


def ask_once(question: GpQuestion) -> Mapping[str, Scalar] | None:
    """Ask a process that is ended afterwards."""
    with GpProcess() as process:
        return process.ask(question)
