"""The same with Optuna, which has no cluster: the trial runs in this process. `python first_optuna.py JOURNAL`."""

import sys
import time

began_s = time.monotonic()

import optuna  # noqa: E402
from optuna.storages import JournalStorage  # noqa: E402
from optuna.storages.journal import JournalFileBackend  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(storage=JournalStorage(JournalFileBackend(sys.argv[1])))
study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=1)
print(time.monotonic() - began_s)
