"""A trial's Trainer: made by the user's own function with what its plan changes, and adapted to the trial."""

import functools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from transformers import Trainer

from dryfit.core.errors import ObjectiveError
from dryfit.core.jobs.rehearsal import ArgumentValue
from dryfit.core.jobs.train import ObjectiveRequest
from dryfit.core.user_code import source_file
from dryfit.jobs.own.objective import seed_libraries
from dryfit.jobs.own.objective_function import import_function
from dryfit.jobs.own.objective_trial import Trial
from dryfit.jobs.own.own_line import OwnLine
from dryfit.jobs.own.trainer_setup import adapt, demand_changed
from dryfit.virtual.script.training_arguments import ArgumentWatch

_UNTRAINED: Final = "a transformers.Trainer that was not trained yet"


def make_trainer(
    calling: ObjectiveRequest, trial: Trial, changed: Mapping[str, ArgumentValue]
) -> tuple[Trainer, list[str]]:
    """Call the user's function, and adapt what it returns; this process belongs to the trial.

    Args:
        calling: The call.
        trial: Its argument.
        changed: Arguments that take the place of the function's own, by name.

    Returns:
        The Trainer, and what is to be said of it.

    Raises:
        ObjectiveError: It cannot be imported, makes no Trainer, one that cannot be searched, or one that cannot be
            changed so.
    """
    make = import_function(calling.objective, "trainer")
    watch = ArgumentWatch({"push_to_hub": False, **changed})
    watch.install()
    seed_libraries(calling.seed)
    with _training_refused(), OwnLine(str(source_file(make) or "")):
        made = make(trial)
    trainer = _checked(made, calling.objective.function)
    demand_changed(trainer, changed, watch.replaced)
    notes = adapt(trainer, trial.folder)
    if watch.replaced.get("push_to_hub"):
        notes.append("push_to_hub=True: nothing is pushed while it is searched")
    return trainer, notes


@contextmanager
def _training_refused() -> Generator[None, None, None]:
    """Refuse the training of any Trainer meanwhile: an attempt could not go on from where it was killed."""
    train = Trainer.train

    @functools.wraps(train)
    def refuse(self: Trainer, *args: object, **kwargs: object) -> None:
        raise ObjectiveError(
            "making the trial's Trainer",
            f"the function itself calls train() of a {type(self).__name__}",
            _UNTRAINED,
            "return it: dryfit trains it; what must be trained before goes into a script of its own",
        )

    Trainer.train = refuse  # pyright: ignore[reportAttributeAccessIssue]  # put back below
    try:
        yield
    finally:
        Trainer.train = train


def _checked(made: object, name: str) -> Trainer:
    """Refuse what is no Trainer, and one that tells nothing while it trains.

    Raises:
        ObjectiveError: Says what is wrong.
    """
    doing = f"taking what {name} returned"
    if not isinstance(made, Trainer):
        what = "None (does every path of the function return a Trainer?)" if made is None else _kind(made)
        raise ObjectiveError(doing, f"it is {what}", _UNTRAINED, "return Trainer(model=..., args=...)")
    if made.state.global_step > 0:
        raise ObjectiveError(doing, f"it has been trained for {made.state.global_step} steps", _UNTRAINED)
    if str(getattr(made.args.eval_strategy, "value", made.args.eval_strategy)) == "no":
        raise ObjectiveError(
            doing,
            "it never evaluates: eval_strategy is 'no', and the study has nothing to compare trials by",
            "eval_strategy='epoch' or 'steps', and an eval_dataset",
        )
    return made


def _kind(made: object) -> str:
    return f"the class {made.__name__}" if isinstance(made, type) else f"a {type(made).__name__}"
