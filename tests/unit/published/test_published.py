"""Published measurements: the rows, what is read of a rehearsal, the scores, and that a stopped run goes on."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[3] / "benchmarks" / "published"
sys.path[:0] = [str(HERE), str(HERE.parent / "strangers")]

import compare  # noqa: E402
import published_list  # noqa: E402
import published_run  # noqa: E402
import published_score  # noqa: E402
import published_times  # noqa: E402

HEADER = "name,family,experiment,commit,origin,device,stack,seen,weights,trained,weight_bits\n"


def row(name="a", family="fms", seen=False, **more):
    return published_list.Row(name, family, "org/model full", "c" * 40, "o", "24GiB", "torch 2", seen, **more)


def test_the_rows_are_read_and_each_has_measured_values():
    rows = published_list.rows_of((HERE / "rows.csv").read_text("utf-8"))
    measured = compare.measured_values((HERE / "measured.csv").read_text("utf-8"))
    assert {row.name for row in rows} == set(measured)
    assert published_list.ANCHOR in measured
    assert all(len(row.commit) == 40 for row in rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a,none,e,c,o,d,s,no,,,", "family 'none'"),
        ("a,fms,e,c,o,d,s,perhaps,,,", "seen is yes or no"),
        ("a,fms,e,c,o,d,s,no,many,,", "invalid literal"),
        ("a,fms,e,c,o,d,s,no,,,\na,fms,e,c,o,d,s,no,,,", "same name"),
    ],
)
def test_a_bad_row_is_refused_with_its_name(line, said):
    with pytest.raises(ValueError, match=said):
        published_list.rows_of(HEADER + line)


def test_the_key_changes_with_what_decides_the_run_alone():
    assert row().key == row(seen=True).key == row(weights=7).key
    assert row().key != row(family="timm").key


def test_counters_of_image_generation_are_those_that_the_script_logs():
    log = '{"mem allocated": "100"} {"mem allocated": "300"}\naccelerator memory max: 7MB\n'
    assert published_list.counters("image-gen", {}, log) == {"allocated": 100, "reserved": 7 * 2**20}
    assert published_list.counters("image-gen", {}, log.replace("max: 7", "max: 0")) == {}


def test_counters_of_metamath_are_the_mean_at_the_end_of_usual_steps_and_the_most_reserved():
    ends = [9 * 2**20] + [5 * 2**20] * 19 + [99 * 2**20] * 4
    answer = {"steps": [{"end_bytes": end} for end in ends], "peak_reserved_bytes": 12 * 2**20}
    assert published_list.counters("metamath", answer, "") == {"allocated": 3 * 2**20, "reserved": 10 * 2**20}
    assert published_list.counters("metamath", {"steps": answer["steps"][:9]}, "") == {}


def test_a_row_tells_the_versions_that_were_not_those_of_its_measurement():
    own = published_list.rows_of(HEADER + "a,fms,e,c,o,d,torch 2.13.0 transformers 5.13.1,no,,,")[0]
    assert own.pins == {"torch": "2.13.0", "transformers": "5.13.1"}
    assert published_score.apart(own, {"stack": {"torch": "2.13.0", "transformers": "5.13.1"}}) == ""
    assert published_score.apart(own, {"stack": {"torch": "2.13.0", "transformers": "5.23.0"}}) == "transformers 5.23.0"
    assert published_score.apart(own, {}) == "torch ? transformers ?"


def test_the_batch_is_the_last_to_which_the_script_went_down():
    log = "Reducing batch size to 384 for retry.\nReducing batch size to 256 for retry.\n"
    assert published_list.counters("timm", {"steps": [{}]}, log) == {"batch": 256}
    assert published_list.counters("timm", {"steps": [{}]}, "") == {"batch": 512}
    assert published_list.counters("timm", {"steps": []}, log) == {}


def test_metamath_is_told_as_a_difference_to_its_anchor_which_has_no_error_of_its_own():
    rows = [row(published_list.ANCHOR, "metamath"), row("b", "metamath"), row("c")]
    predicted = {published_list.ANCHOR: {"allocated": 10, "reserved": 4}, "b": {"allocated": 13}, "c": {"allocated": 1}}
    told = published_score.anchored(predicted, {published_list.ANCHOR: {"allocated": 100}}, rows)
    assert told == {published_list.ANCHOR: {"reserved": 4}, "b": {"allocated": 103}, "c": {"allocated": 1}}
    assert published_score.anchored({"b": {"allocated": 13}}, {}, rows) == {"b": {}}


def test_errors_are_summed_up_without_their_sign():
    rows = [row("a"), row("b"), row("c")]
    predicted = {"a": {"allocated": 110}, "b": {"allocated": 80}, "c": {"allocated": 100, "reserved": 1}}
    found = published_score.errors(rows, predicted, {name: {"allocated": 100} for name in "abc"})
    assert [error.percent for error in found] == [10, -20, 0]
    of = published_score.summary(found)
    assert (of.rows, of.median, of.most) == (3, 10, 20)
    assert of.p95 == pytest.approx(19)
    assert published_score.summary([]) is None


def test_a_larger_batch_than_ran_is_a_false_fit():
    rows = [row(name, "timm") for name in "abc"]
    predicted = {"a": {"batch": 64}, "b": {"batch": 96}, "c": {"batch": 48}}
    of = published_score.batches(published_score.errors(rows, predicted, {name: {"batch": 64} for name in "abc"}))
    assert (of.rows, of.same, of.false_fits, of.smaller) == (3, 1, 1, 1)


def test_a_verdict_is_held_against_what_happened():
    rows = [row(name, "litgpt") for name in "abcde"]
    predicted = {"a": {"fits": 1}, "b": {"fits": 0}, "c": {"fits": 1}, "d": {"fits": 0}, "e": {"allocated": 1}}
    measured = {"a": {"fits": 1}, "b": {"fits": 0}, "c": {"fits": 0}, "d": {"fits": 1}, "e": {"fits": 1}}
    of = published_score.verdicts(rows, predicted, measured)
    assert (len(of.rows), of.false_fits, of.false_refusals) == (4, ("c",), ("d",))
    assert published_score.errors(rows, predicted, measured) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("Batch Size 4: 2.5 MB", {"allocated": 2_621_440, "fits": 1}),
        ("Batch Size 4: OOM (Peak before OOM: 80.5 MB)", {"fits": 0}),
        ("Batch Size 4: Error: no", {}),
        ("", {}),
    ],
)
def test_of_nanovlm_the_last_batch_size_that_its_script_tells_is_held(line, found):
    log = f"Testing Batch Size: 4\nBatch Size 2: 1.00 MB\n{line}\n" if line else "Traceback"
    assert published_list.counters("nanovlm", {}, log) == found


@pytest.mark.parametrize(
    ("verdict", "found"), [("fits", {"allocated": 7, "fits": 1}), ("refused", {"fits": 0}), ("unknown", {})]
)
def test_of_a_run_of_litgpt_its_peak_and_the_verdict_are_held(verdict, found):
    answer = {"verdict": verdict, "peak_allocated_bytes": 7, "steps": [{}, {}]}
    assert published_list.counters("litgpt", answer, "") == found


def test_the_page_and_the_picture_hold_each_row(monkeypatch):
    monkeypatch.setattr(compare, "by_accelerate", lambda one: 8 * one.weights)
    rows = [row("a", weights=1000, trained=1000), row("b", "timm"), row("d")]
    predictions = {"a": {"counters": {"allocated": 11000}}, "b": {"counters": {"batch": 96}}, "d": {"why": "a reason"}}
    measured = {"a": {"allocated": 10000}, "b": {"batch": 64}, "d": {"allocated": 3}}
    text = compare.render(rows, predictions, predictions, measured)
    for said in ("a (allocated +10.0 %)", "96 for 64", "d: a reason", "| 10.00 % | 10.00 % | 10.0 % |"):
        assert said in text
    predicted = {name: record.get("counters", {}) for name, record in predictions.items()}
    image = ET.fromstring(published_score.picture(published_score.errors(rows, predicted, measured)))
    titles = [title.text for title in image.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == ["a, allocated: +10.00 %"]


def timed(estimate_s, batch=None, products=0.5, spread=1.2):
    time = {"estimate_s": estimate_s, "low_s": estimate_s / spread, "high_s": estimate_s * spread, "level": "measured"}
    return {"step_time": time | {"by_kind": {"matmul": products}}, "counters": {"batch": batch} if batch else {}}


def test_step_times_are_compared_by_step_by_sample_and_beside_the_anchor():
    rows = [row("a"), row("b", "timm"), row("c", "metamath"), row(published_list.ANCHOR, "metamath"), row("d")]
    records = {"a": timed(0.11), "b": timed(3.0, batch=10), "c": timed(2.0), published_list.ANCHOR: timed(1.0)}
    measured = {"a": {"step_us": 100_000}, "b": {"sample_ns": 200_000_000}, "c": {"step_us": 4_000_000}}
    measured |= {published_list.ANCHOR: {"step_us": 1_600_000}, "d": {"step_us": 1}}
    found = published_times.step_errors(rows, records, measured)
    assert [(one.row.name, round(one.percent), one.is_inside) for one in found] == [
        ("a", 10, True),
        ("b", 50, False),
        ("c", -20, False),  # 3.2 s for 4: twice the anchor's
    ]
    assert [one.row.name for one in published_times.step_errors(rows, {"c": timed(2.0)}, measured)] == []
    assert "| timm benchmark.py | measured | 1 | 50 % | 50 % | 0 % |" in published_times.times_table(found)


def test_one_row_of_a_card_calibrates_the_products_of_the_others():
    rows = [row(published_times.GIVEN, "timm"), row("b", "timm"), row("c")]
    records = {published_times.GIVEN: timed(1.0, 1), "b": timed(1.0, 1, products=0.25), "c": timed(1.0)}
    measured = {published_times.GIVEN: {"sample_ns": 1_500_000_000}, "b": {"sample_ns": 10**9}, "c": {"step_us": 10**6}}
    found = published_times.with_one_given(published_times.step_errors(rows, records, measured))
    assert [(one.row.name, round(one.percent)) for one in found] == [("b", 25), ("c", 50)]
    assert published_times.with_one_given([]) == []


def test_simple_estimates_count_parameters():
    assert compare.by_formula(row(weights=100, trained=100)) == 100 * (2 + 2 + 4)
    assert compare.by_formula(row(weights=110, trained=10, weight_bits=4)) == 50 + 10 * 16


def test_a_run_that_was_stopped_goes_on_with_the_rows_that_have_no_prediction(tmp_path, monkeypatch):
    rows = [row("a"), row("b")]
    ran = []

    def predict(one, field, limit_s):
        ran.append(one.name)
        return {"counters": {"allocated": 1}} if one.name == "a" else {"not_run": "no package"}

    monkeypatch.setattr(published_run, "predict", predict)
    file = tmp_path / "predictions.jsonl"
    for _ in range(2):
        published_run.run(rows, published_run.Field(tmp_path / "out", {}, own_versions=False), file, 1)
    assert ran == ["a", "b", "b"]  # what had not run is tried again, what is predicted is kept
    assert published_run.records(file)["a"]["counters"] == {"allocated": 1}
    with file.open("a") as stream:
        stream.write(json.dumps({"row": "a", "counters": {"allocated": 2}}) + "\n")
    assert published_run.records(file)["a"]["counters"] == {"allocated": 2}
    assert published_run.first_records(file).keys() == {"a"}
    assert published_run.first_records(file)["a"]["counters"] == {"allocated": 1}
    published_run.run(
        rows, published_run.Field(tmp_path / "out", {}, own_versions=False), tmp_path / "other", 1, until=0
    )
    assert len(ran) == 3


PROGRAM = """
import torch
layer = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(4):
    layer(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.heavy
def test_a_tiny_program_is_predicted(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    tiny = published_list.Family("tiny", "", "", f"{tmp_path}/program.py")
    monkeypatch.setitem(published_list.FAMILIES, "fms", tiny)
    record = published_run.predict(row(), published_run.Field(tmp_path / "out", {}, own_versions=False), 120)
    assert 16 * 2**20 < record["counters"]["allocated"] < 64 * 2**20, json.dumps(record)


def test_what_a_rehearsal_says_of_its_rightness_is_what_the_committed_predictions_come_to():
    rows = published_list.rows_of((HERE / "rows.csv").read_text("utf-8"))
    measured = compare.measured_values((HERE / "measured.csv").read_text("utf-8"))
    told = json.loads(compare.FACTS.read_text("utf-8"))
    assert told == compare.facts(rows, published_run.first_records(published_run.PREDICTIONS), measured)
    assert told["peft"]["of allocated"] > 10 and told["scripts"]["of allocated"] == 61
