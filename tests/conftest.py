"""What every folder of tests shares: golden files, compared or (with `--update-golden`) written anew."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN_DIR = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew from what comes out now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("screens/ps.txt", text)` fails where the text differs from the file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN_DIR / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: pytest --update-golden writes it"
        assert text == path.read_text(), f"{path} differs: pytest --update-golden, and look at the difference"

    return compare
