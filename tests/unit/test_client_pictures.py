"""Pictures of studies: nothing outside its place, nothing hidden by one bad trial, and files that are what they say."""

import math
import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from study_views import TERMS, drawn, failed, table_of, trial

from racimo.client.importance import importance
from racimo.client.pictures.axis import Axis
from racimo.client.pictures.charts import parallel
from racimo.client.pictures.page import Compared, compare_scene, study_scene, write_picture
from racimo.client.pictures.scene import Box, Dot, Frame, Line, Scene, Words, ramp
from racimo.client.pictures.svg import to_svg
from racimo.client.trial_table import TrialTable
from racimo.spec.errors import RacimoError
from racimo.spec.study import StudySpec

TWO = StudySpec(space=TERMS.space, metric=("loss", "max accuracy"), trials=100)


def scene_of(table: TrialTable) -> Scene:
    return study_scene("digits-1", ["100 of 100 trials"], table, importance(table))


def words_of(scene: Scene) -> list[str]:
    return [mark.text for mark in scene.marks if isinstance(mark, Words)]


def good(values: object) -> float:
    return abs(math.log10(values["lr"]) + 3) + 0.01  # type: ignore[index]


def assert_inside(scene: Scene) -> None:
    for mark in scene.marks:
        match mark:
            case Line(points=points):
                places = list(points)
            case Box():
                places = [(mark.x, mark.y), (mark.x + mark.width, mark.y + mark.height)]
            case Dot() | Words():
                places = [(mark.x, mark.y)]
        assert all(0 <= x <= scene.width and 0 <= y <= scene.height for x, y in places), mark


def test_a_study_is_shown_by_history_importance_curves_and_parallel_coordinates() -> None:
    scene = scene_of(drawn(60, good))
    titles = words_of(scene)
    for title in ("How it went", "What mattered", "Each trial, round by round", "Which values the good trials have"):
        assert title in titles
    assert_inside(scene)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_study_of_few_trials_has_a_picture_too(count: int) -> None:
    assert_inside(scene_of(table_of(*drawn(count, good).trials.values(), failed(99))))


def test_several_metrics_show_their_front() -> None:
    trials = [trial(i, metrics={"loss": 0.1 * i, "accuracy": 0.5 + 0.04 * i}) for i in range(9)]
    scene = scene_of(table_of(*trials, terms=TWO))
    assert "The front" in words_of(scene)
    assert_inside(scene)


def test_one_trial_that_went_astray_does_not_flatten_all_others() -> None:
    table = drawn(60, good)
    astray = table_of(*table.trials.values(), trial(60, metrics={"loss": 1e12}))
    heights = [mark.y for mark in scene_of(astray).marks if isinstance(mark, Dot)]
    assert max(heights) - min(heights) > 150
    assert len({round(height) for height in heights}) > 30


def test_nan_and_infinity_are_in_no_picture() -> None:
    bad = trial(0, status="diverged", metrics={"loss": math.nan}, curve=((1, 0.5), (2, math.inf)))
    text = to_svg(scene_of(table_of(bad, *drawn(30, good).trials.values())))
    assert "nan" not in text and "inf" not in text


def test_values_from_before_the_space_was_changed_are_left_out_of_parallel_coordinates() -> None:
    narrow = msgspec.structs.replace(TERMS, space=TERMS.space | {"width": "8..16 step 8"})
    table = drawn(40, good).under(narrow)
    marks = parallel(table, importance(table), Frame(60, 40, 900, 300))
    lines = [mark for mark in marks if isinstance(mark, Line) and mark.title]
    assert 0 < len(lines) < 40


def test_text_of_users_cannot_become_markup() -> None:
    evil = StudySpec(space={"optimizer": ["<script>alert(1)</script>", "b&c"]}, metric="loss")
    table = drawn(20, lambda values: 0.5, evil)
    text = to_svg(study_scene("x<b>", ["a & b"], table, importance(table)))
    assert "<script>" not in text and "<b>" not in text
    ElementTree.fromstring(text)


def test_a_page_of_html_has_no_script_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = tmp_path / "study.html"
    write_picture(scene_of(drawn(30, good)), page, title="a <study>", rows=[{"trial": 3, "why": "<i>x</i>"}])
    text = page.read_text()
    assert "<script" not in text and "<i>x" not in text and "<title>a &lt;study&gt;" in text
    assert not re.search(r'(src|href)="', text)


def test_a_png_is_one_of_twice_the_size(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    file = tmp_path / "study.png"
    scene = scene_of(drawn(30, good))
    write_picture(scene, file, title="x")
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (2 * scene.width, 2 * scene.height)


def test_another_kind_of_file_is_refused_and_so_is_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RacimoError, match=r"\.png, \.html, \.svg"):
        write_picture(scene_of(drawn(3, good)), tmp_path / "x.pdf", title="x")
    with pytest.raises(RacimoError) as caught:
        write_picture(scene_of(drawn(3, good)), tmp_path / "none" / "x.svg", title="x")
    assert caught.value.code == "file-unreadable"


def test_studies_are_compared_by_trials_and_by_device_time() -> None:
    one, other = drawn(40, good), drawn(9, good)
    scene = compare_scene(
        [Compared(name=name, way=t.history, per_trial=t.history) for name, t in (("a-1", one), ("b-2", other))], "loss"
    )
    assert {"a-1", "b-2", "Best so far, by trials", "Best so far, by device time"} <= set(words_of(scene))
    assert_inside(scene)


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [-5.0, 5.0], [1e-9, 1e9], [3e5, 3e5 + 1], [-1e-12, 1e-12]])
def test_an_axis_has_few_round_marks_within_its_ends(values: list[float]) -> None:
    axis = Axis.of(values, 100.0, 300.0)
    assert 1 <= len(axis.ticks) <= 9
    for value in (*values, *axis.ticks):
        assert 100.0 - 1e-6 <= axis.at(value) <= 300.0 + 1e-6


def test_the_colours_of_a_ramp_are_colours() -> None:
    assert all(re.fullmatch("#[0-9a-f]{6}", ramp(place)) for place in (-1.0, 0.0, 0.3, 1.0, 2.0))
