"""The examples of the documents that search or train; a file of their own, which runs beside the others."""

from pathlib import Path

import pytest

from documents import PAGES, run_examples, trains


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", [path for path in PAGES if trains(path)], ids=lambda path: path.name)
def test_examples_that_train_work_as_written(tmp_path: Path, path: Path) -> None:
    assert run_examples(path, tmp_path) > 0
