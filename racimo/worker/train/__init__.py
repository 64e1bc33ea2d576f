"""Training beside the user's code: `run.steps` and what it stands on. See docs/training.md."""
