"""The systems that tuning is measured against, in a virtual environment of their own, `.venvs/tune`, which
`python -m bench.tune_peers` makes: Ray Tune 2.60, Optuna 5 and Syne Tune 0.16 (with what its
quantile regression imports).

What runs in simulated time (`bench.tables`) runs there, ours too: one interpreter, one numpy, one Optuna for all.
"""

import sys
from pathlib import Path

from bench.peers import ROOT, PeerMissing, make_venv

TUNE_VENV = ROOT / ".venvs" / "tune"
TUNE_PACKAGES = (
    "ray[tune]==2.60.0",
    "optuna==5.0.0",
    "syne-tune==0.16.0",
    "huggingface_hub",
    "h5py",
    "fastparquet",
    "onnxruntime",
    "msgspec==0.23.0",
    "psutil",
    "scipy",
)


def tune_python() -> Path:
    """The peers' interpreter. `PeerMissing` with what to type where it was not made."""
    if not (TUNE_VENV / ".ready").exists():
        raise PeerMissing(f"the peers are not installed in {TUNE_VENV}; run: {sys.executable} -m bench.tune_peers")
    return TUNE_VENV / "bin" / "python"


if __name__ == "__main__":
    make_venv(TUNE_VENV, TUNE_PACKAGES)
