"""What `racimo add` brings along: a wheel of this package that pip takes, the same bytes for the same files."""

import email
import io
import zipfile

from racimo.client.parcel import make_parcel


def test_the_same_files_make_the_same_wheel() -> None:
    first, second = make_parcel(), make_parcel()
    assert (first.id, first.content) == (second.id, second.content)


def test_it_is_a_wheel_with_all_that_is_needed_and_nothing_that_was_compiled() -> None:
    parcel = make_parcel()
    with zipfile.ZipFile(io.BytesIO(parcel.content)) as wheel:
        names = wheel.namelist()
        info = parcel.file_name.removesuffix("-py3-none-any.whl") + ".dist-info"
        about = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        record = wheel.read(f"{info}/RECORD").decode()
        points = wheel.read(f"{info}/entry_points.txt").decode()
    assert {"racimo/cli/main.py", "racimo/agent/__main__.py", "racimo/worker/bootstrap.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert about["Name"] == "racimo" and f"racimo-{about['Version']}" == info.removesuffix(".dist-info")
    assert any(requirement.startswith("torch") for requirement in about.get_all("Requires-Dist", []))
    assert "racimo = racimo.cli.main:main" in points
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)


def test_torch_is_of_the_same_minor_version_there() -> None:
    import importlib.metadata

    major, minor = importlib.metadata.version("torch").split(".")[:2]
    assert make_parcel().pins == (f"torch=={major}.{minor}.*",)
