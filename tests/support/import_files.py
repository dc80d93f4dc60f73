"""Small data sets in formats of their own, written by the formats' published descriptions."""

import json
from pathlib import Path
from typing import Any

SENTENCES = (
    "NON-DISCLOSURE AGREEMENT",
    "The Recipient shall keep all Information “secret” for five years.",
    "The Recipient may tell its employees.",
    "This Agreement ends after two years; § 2 survives it.",
    "It is governed by the law of Zürich.",
)
HYPOTHESES = {
    "nda-1": "Some obligations of Agreement may survive termination.",
    "nda-2": "Receiving Party may share information with employees.",
    "nda-3": "Receiving Party may acquire similar information.",
}
CRITERIA = (
    "# what each symptom is\nFATIGUE: Loss of energy nearly every day.\nSLEEP_ISSUES\tToo little sleep, or too much.\n"
)


def contract(number: int, choices: dict[str, tuple[str, list[int]]] | None = None, text: str = "") -> dict[str, Any]:
    """A document as ContractNLI has it; sentences are its spans, with a line break between them."""
    spans: list[list[int]] = []
    sentences = text.splitlines() if text else list(SENTENCES)
    start = 0
    for sentence in sentences:
        spans.append([start, start + len(sentence)])
        start += len(sentence) + 1
    choices = choices or {
        "nda-1": ("Entailment", [3]),
        "nda-2": ("Entailment", [2]),
        "nda-3": ("NotMentioned", []),
    }
    return {
        "id": number,
        "file_name": f"{number}.pdf",
        "text": "\n".join(sentences),
        "document_type": "search-pdf",
        "url": "https://example.org",
        "spans": spans,
        "annotation_sets": [
            {"annotations": {key: {"choice": choice, "spans": list(held)} for key, (choice, held) in choices.items()}}
        ],
    }


def contractnli(*contracts: dict[str, Any]) -> dict[str, Any]:
    """A whole ContractNLI document."""
    labels = {key: {"short_description": key, "hypothesis": text} for key, text in HYPOTHESES.items()}
    return {"documents": list(contracts), "labels": labels}


def squad(articles: int = 3) -> dict[str, Any]:
    """A SQuAD 2.0 document: of each article one paragraph, a question with two answers and one without."""
    data = []
    for number in range(articles):
        context = f"The Normans of article {number} came in the 10th century, in the first half of it, to Rouen."
        data.append(
            {
                "title": f"Normans_{number}",
                "paragraphs": [
                    {
                        "context": context,
                        "qas": [
                            {
                                "id": f"q{number}-a",
                                "question": "When did they come?",
                                "is_impossible": False,
                                "answers": [
                                    {"text": "10th century", "answer_start": context.index("10th")},
                                    {"text": "in the 10th century", "answer_start": context.index("in the 10th")},
                                    {"text": "10th century", "answer_start": context.index("10th")},
                                ],
                            },
                            {
                                "plausible_answers": [{"text": "Rouen", "answer_start": context.index("Rouen")}],
                                "id": f"q{number}-b",
                                "question": "What is Paris a region of?",
                                "answers": [],
                                "is_impossible": True,
                            },
                        ],
                    }
                ],
            }
        )
    return {"version": "v2.0", "data": data}


POSTS = """post_id,text
s_1_1,"I am tired every day. My cat said ""no"".
I cannot  sleep."
s_2_1,"I slept well, and ate."
s_3_1,"Naïve question: is that all? 😴 I sleep all day."
s_4_1,"Nothing here."
"""

ANNOTATIONS = """post_id,sentence_id,sentence_text,DSM5_symptom,status,explanation
s_1_1,s_1_1_1,I am tired every day.,FATIGUE,1,"Tired, and daily."
s_1_1,s_1_1_3,I cannot sleep.,SLEEP_ISSUES,1,No sleep.
s_2_1,s_2_1_1,"I slept well, and ate.",SLEEP_ISSUES,0,Sleeps well.
s_3_1,s_3_1_2,😴 I sleep all day.,SLEEP_ISSUES,1,Too much of it.
"""

RTE = (
    "index\tsentence1\tsentence2\tlabel\n"
    '0\tHe said "no.\tHe spoke.\tentailment\n'
    "1\tIt rained.\tIt was dry.\tnot_entailment\n"
    "2\tÄpfel, they\u2019re red.\tApples are red.\tentailment\n"
    "3\tShe left.\tShe stayed.\tnot_entailment\n"
)
COLA = (
    "gj04\t1\t\tOur friends won't buy this analysis.\n"
    "gj04\t0\t*\tThe more books I ask to whom he will give.\n"
    "bc01\t1\t\tBill sang himself to sleep.\n"
)


def write_json(path: Path, document: Any) -> Path:
    """One JSON document."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def write_text(path: Path, text: str) -> Path:
    """A text, its line ends as they are."""
    path.write_bytes(text.encode())
    return path
