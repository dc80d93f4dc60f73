"""Search for the fewest ranks by which a trial fits, where ``execution.tp`` is "auto"."""

from collections.abc import Sequence
from contextlib import suppress

from dryfit.core.errors import ConfigError, ShardError, TraceError
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.settings.execution import PlanSubject
from dryfit.core.sharding.rank_search import RankOutcome, next_ranks, ranks_taken
from dryfit.jobs.planning.plan_answers import Planner
from dryfit.memory.planning.fallbacks import PlannedTrial
from dryfit.parallel.layout import device_counts
from dryfit.train.optim.optimizer import check_sharded


def on_fewest_ranks(planner: Planner, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
    """Plan a subject on the fewest ranks by which it fits; where none does, return the refusal on one device.

    Raises:
        ConfigError: A setting is impossible.
    """
    request = planner.request
    exact, host_bytes = request.execution.allow == "exact", request.host_bytes
    degrees = () if exact or not request.several else request.degrees
    reasons = ['execution.allow is "exact": ranks add up in another order'] if exact else list[str]()
    answers: dict[int, PlanAnswer] = {}
    outcomes: dict[int, RankOutcome] = {}
    while (ranks := next_ranks(outcomes, degrees)) is not None:
        try:
            if ranks == 1:
                every = request.every_fallback
                answers[ranks] = planner.climb(subject, trial, request.execution, every_fallback=every)
            else:
                answers[ranks] = _on_ranks(planner, subject, ranks)
            outcomes[ranks] = device_counts.rank_outcome(answers[ranks], ranks, host_bytes)
        except (ConfigError, ShardError, TraceError) as error:
            if ranks == 1:
                raise
            outcomes[ranks] = RankOutcome.NOT_POSSIBLE
            reasons.append(device_counts.why_not_sharded(ranks, error))
    alone, taken = answers.pop(1), ranks_taken(outcomes)
    if reasons and not alone.verdict.fits:
        alone = alone.model_copy(update={"cannot_shard": reasons[0]})
    if taken is None:
        return device_counts.with_tried_ranks(alone, answers, host_bytes)
    answer = alone
    if taken > 1:
        answer = device_counts.answer_on_ranks(alone, answers[taken], taken, trial, request.execution)
    return answer if host_bytes is not None else _with_more_ranks(planner, subject, answer, taken, degrees)


def _on_ranks(planner: Planner, subject: PlanSubject, ranks: int) -> PlanAnswer:
    """Plan one rank of a subject; how its model is sharded is proved only where that fits.

    Raises:
        ConfigError: The model cannot be sharded so, or its optimizer takes no slices.
        ShardError: The sharded model computes something else.
        TraceError: The model's code cannot be followed.
    """
    execution = planner.execution_on(ranks)
    check_sharded(subject.settings, execution)
    trial = planner.trials.of(subject, execution)
    answer = planner.climb(subject, trial, execution, every_fallback=False)
    if device_counts.rank_outcome(answer, ranks, planner.request.host_bytes) is not RankOutcome.FITS:
        return answer
    return planner.with_shards(subject, trial, execution, answer, planner.traces.shards.prove(subject, ranks))


def _with_more_ranks(
    planner: Planner, subject: PlanSubject, answer: PlanAnswer, taken: int, degrees: Sequence[int]
) -> PlanAnswer:
    """Add the next number of ranks to fall back to, if the model can be sharded so."""
    for degree in degrees:
        if degree > taken:
            with suppress(ConfigError, TraceError):
                execution = planner.execution_on(degree)
                check_sharded(subject.settings, execution)
                planner.traces.shards.plan(subject, degree)
                may_chunk = planner.trials.of(subject, execution).cannot_chunk is None
                return device_counts.with_more_ranks(answer, degree, may_chunk=may_chunk)
    return answer
