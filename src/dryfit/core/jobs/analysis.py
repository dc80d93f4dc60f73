"""Analysis of a model's answers in numbers: returned by FINAL, stored in model folders, shown in reports.

Numbers that are not finite, or not defined for these rows, are None. Of a row there is its id, never its text.
"""

from dryfit.core.wire import Wire

ANALYSIS_FILE = "analysis.json"
"""Name of the file in a model's folder."""


class ClassScore(Wire):
    """The scores of a class.

    Attributes:
        label: The class.
        support: Rows that have it.
        answered: Rows answered with it.
        right: Rows that are both.
        precision: ``right`` of ``answered``.
        recall: ``right`` of ``support``.
        f1: Their harmonic mean; 0 where no row is right, as in ``f1_macro``.
    """

    label: int
    support: int
    answered: int
    right: int
    precision: float | None
    recall: float | None
    f1: float


class CalibrationBin(Wire):
    """The probabilities that lie between two bounds.

    Attributes:
        low: The smallest that belongs to it.
        high: The next larger bin's; 1 for the bin of the probability 1 as well.
        count: How many.
        p: Their mean.
        share: The share of them that came true.
    """

    low: float
    high: float
    count: int
    p: float
    share: float


class PrecisionRecall(Wire):
    """Precision over recall of a class as its threshold falls; a number of each list is one threshold's.

    Attributes:
        label: The class.
        threshold: The probability above which the model answers with it.
        precision: At the answers as they were given.
        recall: Likewise.
        average_precision: The area under the steps.
        thresholds: Falling; at most 100 of those that decide differently.
        precisions: Of the rows whose probability is that or larger.
        recalls: Likewise.
    """

    label: int
    threshold: float
    precision: float | None
    recall: float | None
    average_precision: float | None
    thresholds: tuple[float, ...]
    precisions: tuple[float, ...]
    recalls: tuple[float, ...]


class WorstRow(Wire):
    """A row that a model has wrong.

    Attributes:
        id: Its own.
        right: What is right: classes, a number, or characters ``12-40``; empty of generated text.
        answered: What the model said, likewise.
        values: Its numbers by name: ``loss`` (of a window or token the mean), ``p`` of the answer, ``p_right``,
            ``token_f1`` ...
    """

    id: str
    right: str
    answered: str
    values: dict[str, float | None]


class ClassAnalysis(Wire):
    """Answers that are classes.

    Attributes:
        classes: How many there are.
        several: A row may have several of them.
        scores: Of each class; of many, of those with the most rows.
        confusion: Rows by right class (first) and answered class, both in the order of ``scores``; empty with several.
        ece: The expected calibration error.
        calibration: Of the likeliest class's probability; with several, of every class's.
        curves: Of class 1 of two; with several, of the classes with the most rows.
        worst: Wrong answers, the largest loss first: the surest errors.
        names: Of all classes, from class 0 on; empty: they are numbers.
    """

    classes: int
    several: bool
    scores: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    ece: float | None
    calibration: tuple[CalibrationBin, ...]
    curves: tuple[PrecisionRecall, ...]
    worst: tuple[WorstRow, ...]
    names: tuple[str, ...] = ()

    def name(self, label: int) -> str:
        """Return the name of a class; its number where classes have no names."""
        return self.names[label] if self.names else str(label)


class SpanAnalysis(Wire):
    """Answers that are spans.

    Attributes:
        found: Rows with a span that are answered with one.
        missed: Rows with a span that are answered with none.
        invented: Rows without a span that are answered with one.
        left: Rows without a span that are answered with none.
        worst: The smallest token F1 first, then the largest loss.
    """

    found: int
    missed: int
    invented: int
    left: int
    worst: tuple[WorstRow, ...]


class TextAnalysis(Wire):
    """Generated texts, or tokens that were only scored.

    Attributes:
        asked: Prompts that an answer was generated for; 0: none was.
        exact: Answers equal to the wanted one.
        worst: Wrong answers, the smallest token F1 and then the largest loss first; where none was generated, the rows
            of the largest loss.
    """

    asked: int
    exact: int
    worst: tuple[WorstRow, ...]


class NumberAnalysis(Wire):
    """Answers that are numbers.

    Attributes:
        mean: Of the right ones.
        deviation: Their standard deviation.
        answered_mean: Of the answers.
        answered_deviation: Likewise; smaller than that of the right ones where a model keeps to the mean.
        worst: The largest error first.
    """

    mean: float | None
    deviation: float | None
    answered_mean: float | None
    answered_deviation: float | None
    worst: tuple[WorstRow, ...]


class PartScores(Wire):
    """The metrics of some rows.

    Attributes:
        name: The criterion, or the group; of all rows ``all``.
        rows: How many.
        scores: Metrics by name.
    """

    name: str
    rows: int
    scores: dict[str, float | None]


class Analysis(Wire):
    """What a model does well and badly on the rows of a split.

    Attributes:
        split: ``test``; ``validation`` where the data has no test rows, by which its weights were chosen.
        rows: Rows that are analysed.
        of: Rows of the split.
        overall: The metrics of all of them.
        classes: Of answers that are classes.
        spans: Of answers that are spans.
        texts: Of generated text.
        numbers: Of a regression.
        criteria: By the question about the text, the most frequent first.
        groups: By group, where they are few.
        notes: What is missing, and why.
    """

    split: str
    rows: int
    of: int
    overall: PartScores
    classes: ClassAnalysis | None = None
    spans: SpanAnalysis | None = None
    texts: TextAnalysis | None = None
    numbers: NumberAnalysis | None = None
    criteria: tuple[PartScores, ...] = ()
    groups: tuple[PartScores, ...] = ()
    notes: tuple[str, ...] = ()
