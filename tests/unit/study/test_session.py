"""A session that cannot begin: whose fault it is, and that nothing is kept of it. No process is started."""

import errno
import os
from pathlib import Path

import pytest

from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import StudyLock, lock_owner
from dryfit.search.space import Space
from dryfit.settings.errors import ExitStatus, MachineError
from dryfit.study.session import run_session
from instant import config


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    study = config()
    (tmp_path / "taken").touch()
    for place in (tmp_path / "taken", tmp_path / "taken" / "study"):
        with pytest.raises(MachineError, match=r"opening the study in .*/taken.*: .*/taken") as caught:
            run_session(study, Space.from_config(study), StudyLayout(place))
        assert caught.value.exit_status is ExitStatus.CANNOT_RUN
        assert "a folder that can be written to" in caught.value.allowed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    study, layout = config(), StudyLayout(tmp_path / "study")

    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refused)
        with pytest.raises(MachineError, match=os.strerror(number)):
            run_session(study, Space.from_config(study), layout)
    assert lock_owner(layout.lock) is None
    with StudyLock(layout.lock):  # the fault left nobody in it
        pass


def test_any_other_failure_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = config()

    def broken(*_: object) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        run_session(study, Space.from_config(study), StudyLayout(tmp_path / "study"))
