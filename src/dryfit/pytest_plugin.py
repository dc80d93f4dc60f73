"""The pytest plugin: tests that run on a virtual GPU, and fail where they need more memory than they may.

``@pytest.mark.gpu_memory("20 GiB", device="rtx4090")`` runs a test, with its fixtures, in a process of its own, as
``dryfit rehearse`` runs a script; the fixture ``rehearsal`` rehearses any script. pytest loads this module wherever
dryfit is installed, so nothing is imported here that costs anything.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

try:
    import pytest
except ImportError as error:
    raise ImportError("dryfit.pytest_plugin belongs to pytest: pip install 'dryfit[pytest]'") from error

if TYPE_CHECKING:
    from dryfit.settings.rehearsal_messages import RehearsalAnswer

_MARKER: Final = "gpu_memory"
_HELP: Final = (
    f"{_MARKER}(budget, device=None, steps=None): run the test on a virtual GPU; fail where it needs more memory"
)
_INSIDE: Final = "DRYFIT_REHEARSAL"
"""``REHEARSED_VARIABLE``, written again: importing its module would cost each run of pytest 40 ms."""
_OUTCOME: Final = "dryfit-test-outcome: "
_MOST_OUTPUT: Final = 1 << 20


class MemoryExceededError(AssertionError):
    """A test needs more memory than it may, or that is not known."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _HELP)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let marked tests run in rehearsals, but not in the process of a rehearsal itself."""
    if _INSIDE not in os.environ:
        items[:] = [RehearsedTest.of(item) if item.get_closest_marker(_MARKER) else item for item in items]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell the process outside how a test in a rehearsal ended: a test that was skipped took no memory."""
    if _INSIDE in os.environ and (report.when == "call" or not report.passed):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        print(f"\n{_OUTCOME}{report.outcome} {' '.join(reason.split())}", flush=True)  # noqa: T201  read outside


@pytest.fixture
def rehearsal() -> Callable[..., "RehearsalAnswer"]:
    """Rehearse a command line: ``rehearsal("train.py --rows 8", device="rtx4090").memory.required_bytes``."""

    def rehearse(command: str | Sequence[str], **options: Any) -> "RehearsalAnswer":
        from dryfit.study.rehearsals import RehearsalOptions, read_command, rehearse_command

        words = shlex.split(command) if isinstance(command, str) else command
        return rehearse_command(read_command(words), RehearsalOptions(**options))

    return rehearse


class RehearsedTest(pytest.Item):
    """A test that runs on a virtual GPU in a process of its own, where its fixtures are made too."""

    selected: str
    budget: str
    device: str
    steps: int | None
    place: "tuple[os.PathLike[str] | str, int | None, str]"

    @classmethod
    def of(cls, item: pytest.Item) -> "RehearsedTest":
        """Return what runs instead of a marked test.

        Raises:
            pytest.UsageError: The marker's arguments are wrong.
        """
        mark = item.get_closest_marker(_MARKER)
        assert mark is not None and item.parent is not None
        test = cls.from_parent(item.parent, name=item.name)
        test.own_markers[:] = item.own_markers
        test.keywords.update(item.keywords)
        try:
            test.budget, test.device, test.steps = _arguments(*mark.args, **mark.kwargs)
        except TypeError as error:
            raise pytest.UsageError(f"{item.nodeid}: {_HELP}: {error}") from error
        test.place = item.reportinfo()
        test.selected = f"{item.path}::{item.nodeid.partition('::')[2]}"
        return test

    def runtest(self) -> None:
        """Rehearse the test.

        Raises:
            MemoryExceededError: It needs too much, or that is not known.
        """
        from dryfit.processes.rehearsed_command import ScriptCommand
        from dryfit.settings.text import parse_bytes
        from dryfit.study.rehearsals import RehearsalOptions, rehearse_command

        budget_bytes = parse_bytes(self.budget)
        output = bytearray()
        manager = self.config.pluginmanager
        alone = [word for plugin, word in (("xdist", "-n0"), ("pytest_cov", "--no-cov")) if manager.hasplugin(plugin)]
        words = (
            "--capture=no",
            "-q",
            "--disable-warnings",
            "--runxfail",
            "-p",
            "no:cacheprovider",
            "-p",
            __name__,
            *alone,
            self.selected,
        )
        options = RehearsalOptions(
            device=self.device,
            steps=self.steps,
            worst_batch=False,
            on_output=output.extend,
            python=sys.executable,  # that of the active environment may be another one
        )
        answer = rehearse_command(ScriptCommand(module="pytest", arguments=words), options)
        text = output[-_MOST_OUTPUT:].decode("utf-8", "replace")
        self.add_report_section("call", "rehearsal", text)
        outcome, _, reason = text.rpartition(_OUTCOME)[2].partition("\n")[0].partition(" ")
        if outcome == "skipped" and _OUTCOME in text:
            pytest.skip(reason)
        trouble = _trouble(answer, outcome, budget_bytes, self.budget)
        if trouble:
            raise MemoryExceededError(trouble)

    def repr_failure(self, excinfo: "pytest.ExceptionInfo[BaseException]", style: Any = None) -> Any:
        """Return what is shown of a failure: the rehearsal's own words, without a traceback of this module."""
        from dryfit.settings.errors import DryfitError

        if isinstance(excinfo.value, MemoryExceededError | DryfitError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> "tuple[os.PathLike[str] | str, int | None, str]":
        """Return where the test stands."""
        return self.place


def _arguments(budget: str, device: str | None = None, steps: int | None = None) -> tuple[str, str, int | None]:
    return budget, device or budget, steps


def _trouble(answer: "RehearsalAnswer", outcome: str, budget_bytes: int, budget: str) -> str:
    """Return why a test fails; empty where it passed, and needs no more than it may."""
    from dryfit.documents.document import Document
    from dryfit.documents.rehearsals import error_lines, lines_table, peak_lines
    from dryfit.settings.memory_terms import VerdictKind
    from dryfit.settings.rehearsal_messages import ScriptEnd
    from dryfit.settings.text import gib

    memory, passed = answer.memory, outcome == "passed" or answer.end is ScriptEnd.STOPPED
    if memory is not None and (memory.required_bytes > budget_bytes or answer.out_of_memory):
        least = "" if passed and not answer.out_of_memory else "at least "
        needs = f"it needs {least}{gib(memory.required_bytes)} of a GPU ({answer.device.name}), its budget is {budget}"
        return str(Document((needs, *error_lines(answer.out_of_memory), *peak_lines(memory), lines_table(memory))))
    if not passed:
        return answer.traceback or f"{'; '.join(answer.reasons)}: see what it printed"
    unknown = answer.end is ScriptEnd.STOPPED and answer.verdict is VerdictKind.UNKNOWN
    return f"what it needs is not known: {'; '.join(answer.reasons)}" if unknown else ""
