"""Token classification (names in a text) with a Trainer, as a script that knows nothing of dryfit.

dryfit init names --script examples/token_classifier.py -- --model answerdotai/ModernBERT-base --eval_strategy epoch
dryfit tune names --set study.metric=eval_f1 --set study.direction=maximize
"""

from dataclasses import dataclass

from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

LABELS = ("O", "PERSON", "PLACE")
NAMES, PLACES = ("ada", "grace", "alan", "edsger"), ("paris", "london", "boston", "delft")
NO_LABEL = -100


@dataclass
class Own:
    """What the script adds to the Trainer's arguments."""

    model: str = "answerdotai/ModernBERT-base"
    rows: int = 400
    sentences: int = 1


def row(n: int, sentences: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """A text of words, each with a label, as tokens: put your own rows here.

    Of a word only the first token has its label.
    """
    words, labels = [], []
    for k in range(n, n + sentences):
        words += [NAMES[k % 4], "went", "from", PLACES[k // 4 % 4], "to", PLACES[k // 16 % 4], "today"]
        labels += [1, 0, 0, 2, 0, 2, 0]
    tokens = tokenizer(words, is_split_into_words=True, truncation=True)
    of_word = tokens.word_ids()
    first = [at is not None and at != before for before, at in zip([None, *of_word], of_word, strict=False)]
    tokens["labels"] = [labels[at] if begins else NO_LABEL for at, begins in zip(of_word, first, strict=True)]
    return dict(tokens)


def scores(found: EvalPrediction) -> dict[str, float]:
    """F1 of the tokens that are a part of a name."""
    said, true = found.predictions.argmax(-1), found.label_ids
    right = ((said == true) & (true > 0)).sum()
    named = ((said > 0) & (true != NO_LABEL)).sum() + (true > 0).sum()
    return {"f1": float(2 * right / max(1, named))}


def main() -> None:
    """Train, and save."""
    own, arguments = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(own.model)
    texts = [row(n, own.sentences, tokenizer) for n in range(own.rows + own.rows // 4)]
    trainer = Trainer(
        model=AutoModelForTokenClassification.from_pretrained(own.model, num_labels=len(LABELS)),
        args=arguments,
        train_dataset=texts[: own.rows],
        eval_dataset=texts[own.rows :],
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
        compute_metrics=scores,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
