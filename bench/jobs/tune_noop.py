"""Trials that do nothing, and one that does nothing but report; what is measured is everything around them."""

import os
import time
from pathlib import Path
from typing import Any

import racimo


def train(config: dict[str, Any]) -> float:
    return float(config["x"])


def report(config: dict[str, Any]) -> None:
    run = racimo.current_run()
    began_s = time.monotonic()
    for number in range(1, config["reports"] + 1):
        run.report(loss=1.0 / number)
    told = f"{began_s} {time.monotonic()}"
    (Path(os.environ["RACIMO_OUTPUT_DIR"]) / "told.txt").write_text(told)
