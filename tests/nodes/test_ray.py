"""Agents on the nodes of a real Ray cluster on this machine, some of which are killed, stopped or added."""

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dryfit.ledger.events import AttemptPlaced
from dryfit.settings.errors import ExitStatus
from launched_studies import LaunchedStudy
from parts import need_package
from slurm_cluster import processes_with
from study_runs import events_of, run

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.nodes
NODES = 3
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def ray(hold: Path) -> Generator["Cluster", None, None]:
    need_package("ray")
    from ray.cluster_utils import Cluster  # heavy, and of no use to those who only collect tests

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("launch", ["ray", "ray:127.0.0.1:1"])
def test_without_a_cluster_none_is_started(study: LaunchedStudy, launch: str) -> None:
    """Runs before the cluster of this file begins: ``ray`` would find that one."""
    need_package("ray")
    done = run(*study.words(launch))
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert "starting agents with Ray" in done.stderr and "a cluster of Ray that this machine belongs to" in done.stderr
    assert not processes_with(str(study.folder))


def test_nodes_are_killed_and_stopped_and_others_come(ray: "Cluster", study: LaunchedStudy, alone: Path) -> None:
    study.tune(f"ray:{ray.address}")
    study.wait_for_joins(NODES)
    first, second = list(ray.worker_nodes)
    ray.remove_node(first, allow_graceful=False)
    study.wait_for_losses(1)
    ray.add_node(**NODE)
    study.wait_for_joins(NODES + 1)
    ray.remove_node(second, allow_graceful=True)
    study.wait_for_losses(2)
    study.ends_as(alone)
    assert study.losses() == ["its agent was ended"] * 2
    used = {event.node for event in events_of(study.folder) if isinstance(event, AttemptPlaced)}
    assert len(used) > 1 and "here" not in used
