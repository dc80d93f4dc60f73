"""A linear model of words: TF-IDF of words and pairs of words, and logistic regression, or ridge regression.

Salton and Buckley 1988 (Inf. Process. Manag. 24(5)); the usual baseline of text classification (Wang and Manning 2012,
ACL). Both are scikit-learn's. Dimension suffixes: ``R`` texts, ``C`` classes.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Asked = tuple[str | None, str]
"""A criterion, or None, and a text."""

_MOST_FEATURES: Final = 100_000
_MOST_CHARS: Final = 10_000
"""Characters of a text that are read."""
_MOST_ROUNDS: Final = 300
_STRENGTH: Final = 10.0
"""Inverse of the regularisation: words of few hundred short texts weigh too little at the default of 1."""
_BESIDE: Final = "\x1f"


def train_words(asked: Sequence[Asked], has_RC: NDArray[Any], *, balanced: bool) -> Callable[[Sequence[Asked]], Any]:
    """Train a linear model of words for each class; where texts have a criterion, each word also together with it.

    Args:
        asked: The texts to learn from.
        has_RC: 1 where a text has a class.
        balanced: Weigh the texts of each class so that all classes weigh the same.

    Returns:
        A function from texts to the probability of each class, (R, C), each decided for itself.
    """
    from sklearn.linear_model import LogisticRegression

    vectorizer = _vectorizer()
    of_words = vectorizer.fit_transform(asked)
    options: Any = {"C": _STRENGTH, "max_iter": _MOST_ROUNDS, "class_weight": "balanced" if balanced else None}
    models: list[Any] = []
    for has_R in has_RC.T:
        learnable = 0 < has_R.sum() < len(has_R)
        models.append(LogisticRegression(**options).fit(of_words, has_R) if learnable else float(has_R.mean()))

    def probabilities(others: Sequence[Asked]) -> NDArray[np.float64]:
        theirs = vectorizer.transform(others)
        columns = [
            np.full(len(others), model) if isinstance(model, float) else model.predict_proba(theirs)[:, 1]
            for model in models
        ]
        return np.stack(columns, axis=1)

    return probabilities


def train_numbers(asked: Sequence[Asked], numbers: Sequence[float]) -> Callable[[Sequence[Asked]], list[float]]:
    """Train a linear model of words for a number: ridge regression.

    Args:
        asked: The texts to learn from.
        numbers: The number of each.

    Returns:
        A function from texts to their numbers.
    """
    from sklearn.linear_model import Ridge

    vectorizer = _vectorizer()
    options: Any = {"solver": "sparse_cg", "alpha": 1.0}
    model: Any = Ridge(**options).fit(vectorizer.fit_transform(asked), numbers)
    return lambda others: model.predict(vectorizer.transform(others)).tolist()


def _vectorizer() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    reading: Any = {"analyzer": _features}  # its stub knows of names alone
    return TfidfVectorizer(**reading, sublinear_tf=True, max_features=_MOST_FEATURES)


def _features(asked: Asked) -> list[str]:
    """Return the words and pairs of words of a text, and with a criterion each word together with it."""
    criterion, text = asked
    words = [word.strip(".,;:!?\"'()[]") for word in text[:_MOST_CHARS].lower().split()]
    found = [*words, *(f"{one} {other}" for one, other in pairwise(words))]
    return found if criterion is None else [*found, *(f"{criterion}{_BESIDE}{word}" for word in found)]
