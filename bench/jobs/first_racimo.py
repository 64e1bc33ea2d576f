"""From `import racimo` to the first trial's result: `python first_racimo.py FOLDER` says the seconds."""

import sys
import time

began_s = time.monotonic()

import racimo  # noqa: E402

client = racimo.Client(may_start=False, say=lambda _text: None)
run = client.tune("tune_noop.py:train", root=sys.argv[1], space={"x": "0.0..1.0"}, metric="loss", trials=10)
study = client.trials(run.id)
while not any(trial.metrics for trial in study.trials):
    study = client.trials(run.id, study.seq, 10.0)
print(time.monotonic() - began_s)
client.wait(run.id)
