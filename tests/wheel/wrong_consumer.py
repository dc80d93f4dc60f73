"""A program that uses dryfit wrongly: pyright must report each line that is marked with its rule, and no other."""

from pathlib import Path

import dryfit

dryfit.tune("study.toml", trials="two")  # wrong: reportArgumentType
dryfit.tune("study.toml", 2)  # wrong: reportCallIssue
dryfit.plan(devices="rtx4090")  # wrong: reportCallIssue
value: float = dryfit.status("study").best.value  # wrong: reportOptionalMemberAccess
folder: Path = dryfit.stop("study")  # wrong: reportAssignmentType
dryfit.load("model", dtype="fp32")  # wrong: reportArgumentType
print(dryfit.train("study").modle)  # wrong: reportAttributeAccessIssue
dryfit.predict("model", "rows.jsonl")  # wrong: reportCallIssue
dryfit.Predictor("model")("one text", bad=True)  # wrong: reportCallIssue
raise dryfit.LoadError("only what was being done")  # wrong: reportCallIssue
