"""A metric of generated answers: ``lm.metric = "answers.py:judged"`` in a study of the task ``causal-lm``.

``study.metric = "answer_f1"`` with ``direction = "maximize"`` makes it the goal.
"""

from sklearn.metrics import f1_score


def judged(answers: list[str], wanted: list[str]) -> dict[str, float | list[float]]:
    """Score words of classes: their macro F1 by scikit-learn, and how many answers are the word of a class at all.

    Args:
        answers: What the model generated, without white space around it.
        wanted: What it should have, in the same order.
    """
    words = sorted(set(wanted))
    return {
        "answer_f1": float(f1_score(wanted, answers, labels=words, average="macro", zero_division=0)),
        "in_words": [float(answer in words) for answer in answers],  # a list: the mean counts, and has an interval
    }
