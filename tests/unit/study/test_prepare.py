"""What baselines are computed with: thresholds fitted wherever those of a trial are."""

from typing import Any

import pytest

import instant
from dryfit.search.space import Space
from dryfit.study.session import with_fitted_thresholds


@pytest.mark.parametrize(
    ("tables", "head", "span"),
    [
        ({}, "fixed", "calibrated"),
        ({"head": {"threshold": "calibrated"}}, "calibrated", "calibrated"),
        ({"space": {"head.threshold": ["fixed", "calibrated"]}}, "calibrated", "calibrated"),
        ({"space": {"head.threshold": ["fixed"]}}, "fixed", "calibrated"),
        ({"space": {"head.threshold": ["fixed", "calibrated"]}, "data": {"num_labels": 3}}, "fixed", "calibrated"),
        (
            {
                "space": {"head.threshold": ["fixed", "calibrated"]},
                "data": {"num_labels": 3, "multi_label": True},
            },
            "calibrated",
            "calibrated",
        ),
        ({"study": {"task": "evidence"}, "span": {"null_policy": "none"}}, "fixed", "none"),
        (
            {"study": {"task": "evidence"}, "space": {"span.null_policy": ["ratio", "calibrated"]}},
            "fixed",
            "calibrated",
        ),
    ],
)
def test_a_threshold_that_a_trial_fits_is_fitted_for_baselines(tables: dict[str, Any], head: str, span: str) -> None:
    config = instant.config(**tables)
    fitted = with_fitted_thresholds(config, Space.from_config(config))
    assert (fitted.head.threshold, fitted.span.null_policy) == (head, span)
    assert fitted.model_copy(update={"head": config.head, "span": config.span}) == config
