"""Tunes a scikit-learn model on the digits that come with it (1,797 pictures of 8 x 8 pixels): no download.

racimo tune examples/digits.yaml                      # 60 trials, the good ones get 27 rounds
python examples/tune_digits.py                        # one training, the same function, no cluster

Needs `pip install scikit-learn`.
"""

from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import racimo

NUM_ROUNDS = 27


def train(config: dict[str, Any]) -> None:
    """Linear models by stochastic gradient descent; a round is one pass over the training pictures."""
    run = racimo.current_run()
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
    scaler = StandardScaler().fit(X)
    X, X_test = scaler.transform(X), scaler.transform(X_test)

    model = SGDClassifier(
        loss=config.get("loss", "log_loss"),
        penalty=config.get("penalty", "l2"),
        alpha=config.get("alpha", 1e-4),
        l1_ratio=config.get("l1_ratio", 0.15),
        learning_rate="adaptive",
        eta0=config.get("eta0", 0.01),
        random_state=0,
    )
    state = {"model": model}
    for number in run.rounds(NUM_ROUNDS, state):  # goes on where it was, if it was paused or its worker died
        order = np.random.default_rng(number).permutation(len(X))
        state["model"].partial_fit(X[order], y[order], classes=np.arange(10))
        run.report(accuracy=float(state["model"].score(X_test, y_test)))


if __name__ == "__main__":
    train({})
