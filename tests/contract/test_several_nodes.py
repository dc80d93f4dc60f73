"""A study whose agents come over TLS: those that know its certificate."""

import json
from pathlib import Path

import pytest

import dryfit.study.functions as api
from agents import address_of, end, joined, start_agent, write_study
from dryfit.settings.errors import ExitStatus
from dryfit.settings.trial import Outcome
from study_runs import DEADLINE_S, ends, events_of, marked_processes, start, wait_for


@pytest.mark.slow
def test_a_study_over_tls_has_the_agents_that_know_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0.1")
    folder = write_study(tmp_path / "study", trials=16, parallel=4, lease_s=5.0, tls=True)
    control = start("tune", folder)
    agents = [start_agent(folder)]
    try:
        host, port = address_of(folder)
        there = ("--join", f"{host}:{port}", "--token-file", folder / "nodes" / "token")
        in_the_plain = start("agent", *there, "--wait", "2")
        mistaken = start("agent", *there, "--fingerprint", "0" * 64, "--wait", "2")
        fingerprint = json.loads((folder / "nodes" / "address.json").read_text(encoding="utf-8"))["fingerprint"]
        agents.append(start_agent(*there, "--fingerprint", fingerprint))
        wait_for(lambda: len(joined(events_of(folder))) == 2, control)
        wait_for(lambda: [one.heard_s is not None for one in api.nodes(folder).nodes] == [True, True], control)
        _, said = control.communicate(timeout=DEADLINE_S)
        assert control.returncode == ExitStatus.DONE, said
        assert f"--fingerprint {fingerprint}" in said
        assert "does not speak TLS" in said and "another certificate" in said
        assert "the other side speaks TLS" in in_the_plain.communicate(timeout=60)[1]
        assert f"fingerprint {fingerprint}, not {'0' * 64}" in mistaken.communicate(timeout=60)[1]
        assert [agent.wait(60) for agent in agents] == [0, 0]
        assert in_the_plain.returncode and mistaken.returncode
    finally:
        for process in (control, *agents):
            end(process)
    assert [trial.outcome for trial in ends(folder)] == [Outcome.COMPLETE] * 16
    assert (folder / "nodes" / "certificate.pem").stat().st_mode & 0o777 == 0o600
    assert marked_processes(folder) == []
