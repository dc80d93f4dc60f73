"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong: no test may fail for the time it takes.
settings.register_profile("dryfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dryfit")
