"""The next point and the verdict on a report, as pure functions of a study's history."""
