"""From the words of a command line to a spec, and the sentences where that cannot be."""

from pathlib import Path

import pytest

from racimo.cli.join import _read_token
from racimo.cli.main import load, main, make_parser
from racimo.cli.submit import make_spec
from racimo.cli.usage import UsageError
from racimo.spec.errors import RacimoError
from racimo.spec.run import CheckpointSpec, RunSpec


def spec_of(*words: str) -> RunSpec:
    name, rest = words[0], list(words[1:])
    parser = make_parser(name)
    load(name)[0](parser)
    return make_spec(parser.read(rest))[0]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["run", "--", "echo", "hi"], ("echo", "hi")),
        (["run", "echo", "hi"], ("echo", "hi")),
        (["run", "--workers", "2", "--", "python", "x.py", "--workers", "9"], ("python", "x.py", "--workers", "9")),
        (["run", "python", "x.py", "--lr", "3", "--", "y"], ("python", "x.py", "--lr", "3", "--", "y")),
        (["run", "--", "--odd-program"], ("--odd-program",)),
        (["run", "--", "sh", "-c", "a -- b", "--", "c"], ("sh", "-c", "a -- b", "--", "c")),
        (["run", "--", "tool", "spec.yaml"], ("tool", "spec.yaml")),
    ],
)
def test_the_command_keeps_its_own_words(words: list[str], command: tuple[str, ...]) -> None:
    assert spec_of(*words).command == command


@pytest.mark.parametrize(
    "words",
    [
        ["train", "t.py", "--workers", "2..4", "--", "--lr", "3e-4"],
        ["train", "--workers", "2..4", "t.py", "--", "--lr", "3e-4"],
        ["train", "--workers=2..4", "t.py", "--", "--lr", "3e-4"],
    ],
)
def test_options_of_train_may_stand_before_and_after_the_script(words: list[str]) -> None:
    assert spec_of(*words) == RunSpec(train="t.py", workers="2..4", args=("--lr", "3e-4"))


def test_a_scripts_own_option_without_dashes_is_explained() -> None:
    with pytest.raises(UsageError) as caught:
        spec_of("train", "t.py", "--lr", "3e-4")
    assert "unknown option --lr" in caught.value.text
    assert "racimo train t.py -- --lr" in caught.value.text


def test_all_fields_have_their_flags() -> None:
    spec = spec_of(
        *(
            "train",
            "t.py:f",
            "--name",
            "n",
            "--workers",
            "2",
            "--devices",
            "cpu:4",
            "--threads",
            "2",
            "--memory",
            "4GB",
        ),
        *("--priority", "high", "--env", "lock.txt", "--variable", "A=1=2", "--secret", "K", "--files", "src"),
        *("--retries", "3", "--seed", "7", "--hang-after", "5m", "--stop-grace", "1s"),
        *("--config", "lr=3e-4", "--config", "name=x", "--config", "deep=[1, 2]"),
        *("--checkpoint-to", "/c", "--checkpoint-every", "50 steps", "--checkpoint-keep", "5"),
    )
    assert spec == RunSpec(
        train="t.py:f",
        name="n",
        workers="2",
        devices="cpu:4",
        threads=2,
        memory="4GB",
        priority="high",
        env="lock.txt",
        variables={"A": "1=2"},
        secrets=("K",),
        files="src",
        retries=3,
        seed=7,
        hang_after="5m",
        stop_grace="1s",
        config={"lr": 3e-4, "name": "x", "deep": [1, 2]},
        checkpoint=CheckpointSpec(to="/c", every="50 steps", keep=5),
    )


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--nproc-per-node", "3"], {"workers": "3"}),
        (["--nproc_per_node=3", "--nnodes=1", "--standalone"], {"workers": "3"}),
        (["--ntasks=4", "--cpus-per-task=2", "--job-name=sft"], {"workers": "4", "threads": 2, "name": "sft"}),
        (["--max-restarts", "2"], {"retries": 2}),
        (["--max_restarts=2"], {"retries": 2}),
        (["--mem=4G"], {"memory": "4GiB"}),
        (["--mem=500"], {"memory": "500MiB"}),
        (["--gpus=2", "--ntasks=2"], {"devices": "cuda:2", "workers": "2"}),
    ],
)
def test_spellings_of_torchrun_and_slurm_mean_the_same(flags: list[str], fields: dict[str, object]) -> None:
    assert spec_of("train", *flags, "t.py") == RunSpec(train="t.py", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "no command"),
        (["run", "--"], "no command"),
        (["train"], "no script"),
        (["run", "-n", "2", "echo"], "write --workers"),
        (["train", "t.py", "-d"], "write --detach"),
        (["run", "-c", "2", "echo"], "write --threads"),
        (["train", "t.py", "--worker", "2"], "did you mean --workers?"),
        (["run", "--nnodes", "2", "echo"], "this cluster has one machine"),
        (["run", "--variable", "A", "echo"], "NAME=VALUE"),
        (["run", "--retries", "-1", "echo"], "a count from 0 up"),
        (["train", "t.py", "u.py"], "one argument too many"),
    ],
)
def test_what_cannot_be_meant_is_said_with_a_way_out(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(*words)
    assert said in caught.value.text and f"racimo {words[0]}" in caught.value.text


@pytest.mark.parametrize("workers", ["zero", "0", "4..2"])
def test_a_count_of_workers_that_is_none(workers: str) -> None:
    with pytest.raises(RacimoError, match=workers) as caught:
        spec_of("run", "--workers", workers, "echo")
    assert caught.value.code == "invalid-spec"


def test_a_yaml_file_and_flags_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "s.yaml").write_text("train: t.py\nworkers: 2\nargs: [--lr, 1]\n")
    monkeypatch.chdir(tmp_path)
    assert spec_of("train", "job/s.yaml") == RunSpec(train="t.py", workers=2, args=("--lr", "1"))
    assert spec_of("train", "job/s.yaml", "--workers", "3", "--", "--lr", "2") == RunSpec(
        train="t.py", workers="3", args=("--lr", "2")
    )
    parser = make_parser("train")
    load("train")[0](parser)
    spec, root = make_spec(parser.read(["job/s.yaml", "--files", "job"]))
    assert root == tmp_path / "job" and spec.files == str(tmp_path / "job")


def test_a_yaml_file_of_the_other_kind_names_the_right_command(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("command: [echo]\n")
    with pytest.raises(RacimoError) as caught:
        spec_of("train", str(tmp_path / "s.yaml"))
    assert caught.value.hint == f"racimo run {tmp_path / 's.yaml'}"


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["pss"], 2, "did you mean racimo ps?"),
        (["--output"], 2, "options follow their command"),
        (["ps", "--al"], 2, "did you mean --all?"),
        (["exec", "r-1", "ls"], 2, "racimo exec RUN -- ls"),
        (["exec", "r-1"], 2, "no command"),
        (["scale", "r-1", "many"], 2, "a count or a range"),
        (["secret", "set", "KEY=value"], 2, "could be read by others"),
        (["secret", "rm"], 2, "no NAME"),
        (["train", "nowhere.py"], 2, "file-missing"),
    ],
)
def test_usage_errors_exit_with_2_on_stderr(
    words: list[str], exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == exit_code
    out, err = capsys.readouterr()
    assert out == "" and said in err


def test_help_in_every_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        assert "usage: racimo COMMAND" in capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    for words in (["help", "ps"], ["ps", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert "usage: racimo ps" in capsys.readouterr().out


def test_errors_are_json_where_json_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.py", "-o", "json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith('{"code":"file-missing"')


def test_help_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    script = "import sys; from racimo.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "httpx", "msgspec", "rich", "argparse", "asyncio", "psutil"}


def test_looking_loads_no_torch() -> None:
    import subprocess
    import sys

    script = "import racimo.cli.runs, racimo.cli.submit, racimo.cli.follow, racimo.client.api, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "numpy", "ray", "asyncio", "starlette", "uvicorn"}


def test_a_token_file_that_others_can_read_is_named_with_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o644)
    assert _read_token(str(file)).secret == "secret"
    said = capsys.readouterr().err
    assert f"chmod 600 {file}" in said and "secret" not in said
    file.chmod(0o600)
    _read_token(str(file))
    assert capsys.readouterr().err == ""
