"""Where things lie that no single study owns."""

from pathlib import Path

from dryfit.ledger.folder import shared_traces

HOME = Path("/home/me")


def test_traces_lie_in_the_users_cache_unless_the_environment_says_otherwise() -> None:
    assert shared_traces({}, HOME) == HOME / ".cache/dryfit/traces"
    assert shared_traces({"XDG_CACHE_HOME": "/var/cache"}, HOME) == Path("/var/cache/dryfit/traces")
    assert shared_traces({"XDG_CACHE_HOME": "relative"}, HOME) == HOME / ".cache/dryfit/traces"
    both = {"XDG_CACHE_HOME": "/var/cache", "DRYFIT_CACHE": "/scratch/dryfit"}
    assert shared_traces(both, HOME) == Path("/scratch/dryfit/traces")
