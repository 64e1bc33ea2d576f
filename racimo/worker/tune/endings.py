"""Exit codes of a worker of a tune run that could not go on, after its trial's result was told."""

LATE_METRIC_CODE = 70
"""Its trial told nothing for too long: its function cannot be left otherwise."""
NOT_LEFT_CODE = 71
"""Its function went on after its trial was left."""
DEVICE_BROKEN_CODE = 72
"""Its accelerator answers every call with an error."""
