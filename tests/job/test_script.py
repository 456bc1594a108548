"""Job scripts: what they ask for, that bash and shellcheck take them, and that every word arrives as it was given."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpishard.cli import main
from mpishard.job import site_named, site_names

JOBS = Path(__file__).parents[2] / "jobs"
# what is found in paths, and what shells, schedulers and templates read as their own
WORDS = st.one_of(
    st.text(st.sampled_from("a /-:~%{}$()`'\"\\\n\t\r\x01#!*?&|;<>é🙂\udc80"), min_size=1, max_size=12),
    st.sampled_from(["$(touch evil)", "`touch evil`", "a\n#SBATCH --account=evil", "{{ 7 * 7 }}", "'; touch evil; '"]),
)
SLURM = ["slurm", "render", "--site", "generic-cpu"]
# writes its arguments and what it was given, as data
FAKE = """#!{python} -IS
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "calls"), "a") as file:
    said = [os.path.basename(__file__), sys.argv[1:], os.environ.get("MPISHARD_CHECKPOINTS"), os.environ.get("SOURCED")]
    print(json.dumps(said), file=file)
if "scontrol" in __file__ and "show" in sys.argv:
    print(os.environ.get("SAYS", ""))
sys.exit(int(os.environ.get("CODE", 0)) if "srun" in __file__ or "mpiexec" in __file__ else 0)
"""


@pytest.fixture
def shell(tmp_path: Path):
    """Run a script where the programs of a cluster are fakes: ``shell(script, **variables)`` -> code, their calls."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("srun", "mpiexec", "scontrol", "qsub", "sbatch"):
        (place / name).write_text(FAKE.replace("{python}", sys.executable))
        (place / name).chmod(0o755)

    def run(script: Path, **variables: str):
        (place / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", script],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        calls = (place / "calls").read_text().splitlines() if (place / "calls").exists() else []
        assert not (tmp_path / "evil").exists()
        return done.returncode, [json.loads(line) for line in calls], done.stderr

    return run


def made(arguments: list[str], path: Path) -> Path:
    assert main([*arguments[:2], "--output", os.fspath(path), *arguments[2:]]) == 0
    return path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    return err


def scripts() -> list[Path]:
    found = [path for path in sorted(JOBS.glob("*.*")) if "# mpishard " in path.read_text()[:40]]
    assert len(found) >= 9
    return found


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_what_is_checked_in_is_what_the_command_prints(path: Path, tmp_path: Path) -> None:
    program, *arguments = shlex.split(path.read_text().splitlines()[1].removeprefix("# "))
    assert program == "mpishard"
    assert made(arguments, tmp_path / "script").read_text() == path.read_text(), f"{program} {shlex.join(arguments)}"


def check_syntax(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    beside = Path(sys.executable).with_name("shellcheck")
    program = os.fspath(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.fail("no shellcheck: install the extra mpishard[dev]", pytrace=False)
    done = subprocess.run([program, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.*")), ids=lambda path: path.name)
def test_bash_and_shellcheck_take_what_is_checked_in(path: Path) -> None:
    check_syntax(path)


@pytest.mark.parametrize("name", site_names())
def test_scripts_of_every_site(name: str, tmp_path: Path) -> None:
    scheduler = site_named(name).fact("scheduler", "slurm")
    script = made([scheduler, "render", "--site", name, "--account", "abc", "--nodes=2", "--", "prog"], tmp_path / "s")
    check_syntax(script)
    text = script.read_text()
    for directive in site_named(name).fact("directives", []):
        assert directive in text
    assert str(site_named(name).fact("cpu_bind", "")) in text


@pytest.mark.parametrize("name", site_names())
def test_every_fact_has_a_source(name: str) -> None:
    generic = name.startswith("generic")
    for fact, entry in site_named(name).facts.items():
        assert set(entry) == {"value", "source"}, fact
        assert entry["source"].startswith("https://") or generic, fact


def test_binding_gives_every_gpu_its_cores() -> None:
    for name in ("frontier", "lumi-g"):
        fact = site_named(name).fact
        masks = [int(mask, 16) for mask in fact("cpu_bind").removeprefix("mask_cpu:").split(",")]
        assert len(masks) == fact("gpus_per_node")
        assert all(mask.bit_count() == fact("cpu_bind_cores") for mask in masks)
        assert sum(masks).bit_count() == sum(mask.bit_count() for mask in masks)
    # GPU 0 of Frontier lies beside cores 48 to 55, GPU 4 beside 0 to 7
    assert masks_of("frontier")[0] & (0xFF << 48)
    assert masks_of("frontier")[4] & 0xFF


def masks_of(name: str) -> list[int]:
    return [int(mask, 16) for mask in site_named(name).fact("cpu_bind").removeprefix("mask_cpu:").split(",")]


@settings(max_examples=25)
@given(st.lists(WORDS, max_size=3), WORDS, WORDS)
@example(["a\nb", "$(touch evil)", "it's"], "c $(d)\n", "e'\nf")
def test_words_arrive_as_they_were_given(tmp_path_factory, rest: list[str], folder: str, environment: str) -> None:
    tmp_path = tmp_path_factory.mktemp("words")
    arguments = ["prog", *rest]
    for render, launcher in (
        (SLURM, "srun"),
        (["pbs", "render"], "mpiexec"),
        (["mpirun", "render", "--ranks-per-node=1"], "mpiexec"),
    ):
        place = tmp_path / launcher / render[0]
        place.mkdir(parents=True)
        # a file that says whether it was sourced, by a hostile name where a file can have it
        source = place / (environment.replace("/", "_").strip(".") or "env")
        source.write_bytes(b"export SOURCED=yes\n")
        given = [*render, f"--env={source}", f"--checkpoints={folder}", "--", *arguments]
        if launcher == "mpiexec" and ":" in rest:
            assert main(given) == 2
            continue
        script = made(given, place / "script.sh")
        check_syntax(script)
        code, calls, error = faked(place, script)
        assert code == 0, error
        ((name, argv, checkpoints, sourced),) = calls
        assert name == launcher
        assert argv[len(argv) - len(arguments) :] == arguments
        assert checkpoints == folder
        assert sourced == "yes"
        assert not list(tmp_path.rglob("evil"))


def faked(place: Path, script: Path):
    programs = place / "bin"
    programs.mkdir()
    for name in ("srun", "mpiexec"):
        (programs / name).write_text(FAKE.replace("{python}", sys.executable))
        (programs / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script], cwd=place, env=variables, capture_output=True, timeout=60)
    calls = (programs / "calls").read_text().splitlines() if (programs / "calls").exists() else []
    return done.returncode, [json.loads(line) for line in calls], done.stderr


@settings(max_examples=25)
@given(name=WORDS, account=WORDS)
def test_directives_are_one_line_each(tmp_path_factory, name: str, account: str) -> None:
    path = tmp_path_factory.mktemp("directives") / "script"
    plain = [*SLURM, "--job-name", "x", "--account", "x", "--", "prog"]
    hostile = [*SLURM, f"--job-name={name}", f"--account={account}", "--", "prog"]
    if any(ord(c) < 32 for c in name + account):
        assert main(hostile) == 2
        return
    lines = [made(arguments, path).read_bytes().splitlines() for arguments in (plain, hostile)]
    assert len(lines[0]) == len(lines[1])
    different = [b for a, b in zip(*lines) if a != b]
    assert all(line.startswith((b"# ", b"#SBATCH --job-name=", b"#SBATCH --account=")) for line in different)
    check_syntax(path)


def test_a_job_that_saved_is_queued_again_until_the_cap(tmp_path: Path, shell) -> None:
    script = made([*SLURM, "--checkpoints", "c", "--max-requeues", "2", "--", "prog"], tmp_path / "script")
    # 138: told before the program noticed signals
    for restarts, code, again in (
        ("0", 75, True),
        ("1", 75, True),
        ("2", 75, False),
        ("0", 1, False),
        ("0", 138, True),
    ):
        # scontrol's fake returns, where the real one ends the script
        got, calls, _ = shell(script, CODE=str(code), SLURM_RESTART_COUNT=restarts)
        assert got == (75 if code == 138 else code)
        assert (["scontrol", ["requeue", "7"]] in [call[:2] for call in calls]) == again
    assert "cap is 2" in shell(script, CODE="75", SLURM_RESTART_COUNT="2")[2]
    code, calls, error = shell(script, SLURM_RESTART_COUNT="3")
    assert (code, calls) == (1, [])
    assert "cap is 2" in error


@pytest.mark.parametrize(
    ("state", "again"),
    [
        # while it runs; when its time is over; when its user cancels it
        ("RUNNING Reason=None", True),
        ("COMPLETING Reason=TimeLimit", True),
        ("COMPLETING Reason=None", False),
        ("CANCELLED Reason=None", False),
        ("PREEMPTED Reason=None", True),
    ],
)
def test_a_job_that_was_cancelled_is_not_queued_again(tmp_path: Path, shell, state: str, again: bool) -> None:
    script = made([*SLURM, "--checkpoints", "c", "--", "prog"], tmp_path / "script")
    code, calls, error = shell(script, CODE="75", SAYS=f"JobId=7 JobName=x JobState={state} Dependency=(null)")
    assert code == 75
    assert (["scontrol", ["requeue", "7"]] in [call[:2] for call in calls]) == again
    assert ("cancelled" in error) != again


def test_a_task_of_an_array_is_queued_again_alone(tmp_path: Path, shell) -> None:
    script = made([*SLURM, "--checkpoints", "c", "--array", "0-3", "--", "prog"], tmp_path / "script")
    # the last task of an array has its number
    _, calls, _ = shell(script, CODE="75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    asked = ["--oneliner", "show", "job", "7_3"]
    assert [call[1] for call in calls if call[0] == "scontrol"] == [asked, ["requeue", "7_3"]]
    assert [call[2] for call in calls if call[0] == "srun"] == ["c/3"]


def test_pbs_starts_a_job_that_saved_again_until_the_cap(tmp_path: Path, shell) -> None:
    script = made(["pbs", "render", "--checkpoints", "c", "--max-requeues", "2", "--", "prog"], tmp_path / "script")
    for restarts, code, again in (("0", 75, True), ("2", 75, False), ("0", 3, False)):
        got, calls, _ = shell(script, CODE=str(code), MPISHARD_RESTARTS=restarts)
        assert got == code
        assert ("qsub" in [call[0] for call in calls]) == again


def test_without_a_checkpoint_folder_nothing_is_queued_again(tmp_path: Path, shell) -> None:
    script = made([*SLURM, "--", "prog"], tmp_path / "script")
    got, calls, _ = shell(script, CODE="75")
    assert got == 75
    assert [call[0] for call in calls] == ["srun"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--site nowhere", "generic-cpu, generic-gpu, perlmutter"),
        ("--site perlmuter", "write perlmutter, or take generic-cpu"),
        ("--site frontier", "--account"),
        ("--site frontier --account a --gpus-per-node 9", "at most 8"),
        ("--gpus-per-node 1", "at most 0"),
        ("--site frontier --account a --cpus-per-rank 8", "at most 56 cores"),
        ("--site polaris --account a", "pbs"),
        ("--time 1:60:00", "HH:MM:SS"),
        ("--time 00:00:00", "HH:MM:SS"),
        ("--time tomorrow", "HH:MM:SS"),
        ("--nodes 0", "at least 1"),
        ("--ranks-per-node 0", "at least 1"),
        ("--cpus-per-rank 0", "at least 1"),
        ("--nodes 2 --ranks-per-node 3 --mesh 4x-1", "product 6"),
        ("--nodes 2 --ranks-per-node 3 --mesh 2x2", "product 6"),
        ("--mesh two", "4x2"),
        (f"--mesh {'9' * 5000}", "4x2"),
        ("--mesh 2-3", "4x2"),
        ("--max-requeues -1", "0 to 1000"),
        ("--max-requeues 1000000", "0 to 1000"),
        ("--array x", "indices"),
        ("--array 9-0", "indices"),
        ("--array 1,9-0", "indices"),
        (f"--array 0-{'9' * 5000}", "indices"),
        ("--array 0-9:0", "indices"),
        # it would never start
        ("--array 0-9%0", "indices"),
        ("--time 01:00:0\u0660", "HH:MM:SS"),
        ("--time 99999-00:00:00", "HH:MM:SS"),
        ("--nodes 1000000 --ranks-per-node 1000000", "2147483647"),
        ("--nodes 4 --mesh -1x-1", "product 4"),
    ],
)
def test_wrong_requests_are_refused(options: str, expected: str, capsys) -> None:
    assert expected in refused(["slurm", "render", *options.split(), "--", "prog"], capsys)


def test_wrong_commands_are_refused(capsys, tmp_path: Path) -> None:
    assert "after --" in refused([*SLURM, "--", "-c", "x"], capsys)
    refused(SLURM, capsys)
    assert "add up" in refused([*SLURM, "--multi-prog", "--", "-n", "2", "a", ":", "-n", "3", "b"], capsys)
    assert "colon" in refused([*SLURM, "--multi-prog", "--", "-n", "2", "a", ":"], capsys)
    for ranks in ("0", "-1", "two", "9" * 5000, "\u0662"):
        assert "colon" in refused([*SLURM, "--multi-prog", "--", "-n", ranks, "a"], capsys)
    assert "quotes" in refused(["pbs", "render", "--job-name", "two words", "--", "a"], capsys)
    assert "a letter" in refused(["pbs", "render", "--job-name", "2fast", "--", "a"], capsys)
    for array in ("5", "1,3", "4-4", "9-3", "0-9:0", "0-9%0"):
        assert "a range of PBS" in refused(["pbs", "render", "--array", array, "--", "a"], capsys)
    assert "--output" in refused([*SLURM[:2], "--output", f"{tmp_path}/no/such/x", "--", "a"], capsys)


def test_meshes_that_fit(tmp_path: Path) -> None:
    for mesh in ("2x3", "-1,2", "6", "3x-1"):
        made([*SLURM, "--nodes=2", "--ranks-per-node=3", f"--mesh={mesh}", "--", "prog"], tmp_path / "script")


def test_submission_hands_the_script_to_sbatch(tmp_path: Path, shell, monkeypatch) -> None:
    shell(made([*SLURM, "--", "true"], tmp_path / "script"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin" / "calls").unlink()
    assert main(["slurm", "submit", "--dry-run", "--", "prog"]) == 0
    assert main(["slurm", "submit", "--", "prog"]) == 0
    calls = [json.loads(line)[:2] for line in (tmp_path / "bin" / "calls").read_text().splitlines()]
    assert calls == [["sbatch", ["--test-only"]], ["sbatch", []]]


def test_a_short_job_is_told_after_half_its_time(tmp_path: Path) -> None:
    options = ["--time", "00:01:30", "--checkpoints", "c", "--", "prog"]
    slurm = made([*SLURM, *options], tmp_path / "slurm").read_text()
    assert "\n# 45 s before the time is over" in slurm
    assert "#SBATCH --signal=B:USR1@45\n" in slurm
    assert "--signal=USR1 45 " in made(["pbs", "render", *options], tmp_path / "pbs").read_text()


def test_output_is_a_file_or_what_is_printed(tmp_path: Path, capsysbinary) -> None:
    path = tmp_path / "script"
    text = made([*SLURM, "--", "prog"], path).read_bytes()
    assert os.access(path, os.X_OK)
    for output in ((), ("--output", "-")):
        assert main([*SLURM, *output, "--", "prog"]) == 0
        assert capsysbinary.readouterr().out == text


def test_submission_needs_slurm(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    assert "no sbatch here" in refused(["slurm", "submit", "--", "prog"], capsys)
