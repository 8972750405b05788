"""Measurements: every arm checked before it is timed, every time beside the copy rate of the same run."""
