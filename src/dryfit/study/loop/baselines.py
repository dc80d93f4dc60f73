"""What a study's metric is worth without a model, found out by a child before the first trial."""

import hashlib

from dryfit.config.schema import StudyConfig
from dryfit.core.jobs.baselines import BaselinesRequest
from dryfit.core.jobs.train import ResolveResult
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.wire import canonical_json
from dryfit.runtime.machine.node import Nodes
from dryfit.scoring.row_files import FACTS_FILE
from dryfit.store.events import BaselinesComputed
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.study.loop.child_jobs import ChildJob, run_job
from dryfit.study.loop.stops import StopRequests
from dryfit.study.trials.child_limits import preparing_limits


def baselines_are_known(config: StudyConfig, layout: StudyLayout, state: StudyState, resolved: ResolveResult) -> bool:
    """Whether nothing is left to find out: the study has its baselines, wants none, or its task can have none."""
    if config.objective is not None or config.study.baselines_s == 0:
        return True
    known = state.baselines is not None and state.baselines.key == _key(config, resolved)
    return known and (layout.baselines / FACTS_FILE).is_file()


def compute_baselines(
    config: StudyConfig, layout: StudyLayout, resolved: ResolveResult, nodes: Nodes, stops: StopRequests
) -> BaselinesComputed | None:
    """Run BASELINES.

    Returns:
        The event of what was found; None if a stop was asked for meanwhile.

    Raises:
        DryfitError: As the child raised, or it died several times.
    """
    body = BaselinesRequest(
        task=config.study.task,
        metric=config.study.metric,
        direction=config.study.resolved_direction,
        data=config.data,
        settings=config.trial_settings,
        cache_dir=str(layout.cache),
        data_fingerprint=resolved.data_fingerprint,
        out_dir=str(layout.baselines),
        limit_s=config.study.baselines_s,
    )
    job = ChildJob("computing baselines", body, layout.preparations, preparing_limits(config.runtime))
    result = run_job(job, nodes, stops)
    return None if result is None else BaselinesComputed(key=_key(config, resolved), result=result)


def _key(config: StudyConfig, resolved: ResolveResult) -> str:
    """Return a hash of all that decides the baselines, wherever the study lies."""
    settings, data = config.trial_settings, config.data
    decides = [
        str(config.study.task),
        str(config.study.metric),
        str(config.study.resolved_direction),
        resolved.data_fingerprint,
        [data.num_labels, data.multi_label, data.folds, data.split_seed],
    ]
    if facts_of(config.study.task).decoder:  # its loss is one of tokens
        decides += [
            settings.model.model_dump(mode="json"),
            settings.lm.model_dump(mode="json"),
            settings.train.max_length,
        ]
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()[:16]
