"""`toolkit train` and `toolkit recipes configs`: what is handed to Accelerate's launcher, and its exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env
from support.cases import cases
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner, Result

from toolkit.cli.app import app
from toolkit.cli.ranks import launch_options, launcher
from toolkit.cli.ranks.launcher import run_launcher
from toolkit.errors import BadInputError, ToolkitError
from toolkit.pages.parts.story import Story
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import Status, state_of
from toolkit.ranks import free_port
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import stdout_on_stderr

TABLES = cases(__file__)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the launcher was started with; it does nothing, on a machine with two GPUs."""
    found: list[list[str]] = []

    def note(words: list[str], output_dir: Path, *, recipe: Recipe) -> int:
        found.append(words)
        return 3

    monkeypatch.setattr(launcher, "run_launcher", note)
    monkeypatch.setattr(launch_options, "count_gpus", lambda: 2)
    monkeypatch.setenv(launch_options.ON_CPU, "")
    monkeypatch.chdir(ROOT)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


MACHINE_1_OF_3 = ["--num-machines", "3", "--machine-rank", "1", "--main-process-ip", "10.0.0.1"]


@pytest.mark.parametrize(("arguments", "options"), TABLES["LAUNCHED"])
def test_it_launches_the_line_that_it_prints(arguments: list[str], options: str, launched: list[list[str]]) -> None:
    result = run("quickstart", "training.max_steps=3", *arguments)
    (words,) = launched
    overrides = [word for word in arguments if "=" in word]
    machines = "--num_machines 3 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500"
    expected = options.replace("STRATEGY", "--fsdp_sharding_strategy zero1+offload").replace("MACHINES", machines)
    last = ["--dry-run"] if "--dry-run" in arguments else []
    assert words == [
        "--config_file",
        *expected.split(),
        "recipes/finetune.py",
        "quickstart",
        "training.max_steps=3",
        *overrides,
        *last,
    ]
    *_, line = result.stderr.splitlines()
    on_cpu = "--cpu" in arguments
    assert line == ("ACCELERATE_USE_CPU=true " if on_cpu else "") + f"accelerate launch {shlex.join(words)}"
    assert os.environ[launch_options.ON_CPU] == ("true" if on_cpu else "")
    assert result.exit_code == 3, "the launcher's own"


@pytest.mark.parametrize(
    ("device", "overrides", "shard"),
    [(["--gpus", "2"], [], "2"), (["--cpu", "4"], [], "4"), (["--cpu", "4"], ["sharding.tensor=2"], "2")],
)
def test_accelerate_hands_the_groups_of_hybrid_on(
    device: list[str], overrides: list[str], shard: str, launched: list[list[str]]
) -> None:
    """Read by its own parser, where the option was a switch and not `--use_parallelism_config true`."""
    run("quickstart", *device, "--strategy", "hybrid", *MACHINE_1_OF_3, *overrides)
    settings, _, _ = _validate_launch_command(launch_command_parser().parse_args(launched[0]))
    given = prepare_multi_gpu_env(settings)
    assert settings.training_script == "recipes/finetune.py"
    assert [given[f"PARALLELISM_CONFIG_DP_{axis}_SIZE"] for axis in ("REPLICATE", "SHARD")] == ["3", shard]
    assert (given["FSDP_SHARDING_STRATEGY"], given["FSDP_VERSION"]) == ("hybrid", "2")


def test_a_path_with_spaces_is_one_word_of_the_line(launched: list[list[str]], tmp_path: Path) -> None:
    recipe = tmp_path / "my recipes; all/mine.yaml"
    copied = CliRunner().invoke(app, ["recipes", "copy", "quickstart", str(recipe)])
    assert copied.output.endswith(f"toolkit train '{recipe}'\n")
    config = tmp_path / "my configs/two.yaml"
    copied = CliRunner().invoke(app, ["recipes", "copy", "cpu_2", str(config)])
    assert copied.output.endswith(f"--config '{config}'\n")
    result = run(str(recipe), "--config", str(config), f"training.output_dir={tmp_path}/my run")
    printed = shlex.split(result.stderr.splitlines()[-1])
    assert printed == ["accelerate", "launch", *launched[0]]
    assert {str(recipe), str(config), f"training.output_dir={tmp_path}/my run"} <= set(printed)


@pytest.mark.parametrize(("arguments", "message"), TABLES["REFUSED"])
def test_bad_input_starts_no_rank(arguments: list[str], message: str, launched: list[list[str]]) -> None:
    result = run("quickstart", *arguments)
    assert isinstance(result.exception, BadInputError), result.output
    assert message in str(result.exception)
    assert launched == []


def test_no_gpu_needs_a_word(launched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_options, "count_gpus", lambda: 0)
    assert "--cpu 2 trains on the CPU" in str(run("quickstart").exception)
    for typed, message in (
        (["--strategy", "zero4"], "--strategy: unknown strategy 'zero4'; allowed: ddp, zero1"),
        (["--strategy", "zero4", "--gpus", "2"], "--strategy: unknown strategy 'zero4'"),
        (["--config", "nowhere"], "--config: there is no file 'nowhere'"),
        (["--config", "two_nodes", "--gpus", "2"], "--config two_nodes: it is for 2 machines"),
    ):
        assert message in str(run("quickstart", *typed).exception), "what is typed is looked at without a GPU, too"


@pytest.mark.parametrize(("code", "exit_code", "ended"), TABLES["EXIT_CODES"])
def test_the_exit_code_of_the_rank_that_failed(
    code: str, exit_code: int | None, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # a list, which Accelerate's launcher does not read
    script = tmp_path / "script.py"
    script.write_text(code)
    words = ["--config_file", str(ROOT / "accelerate_configs/gpu_1.yaml"), str(script)]
    page = tmp_path / "report.html"
    status = Status("running", 6, 10, None, 0.0, 30)
    write_report(page, RunSummary("run", "", [], {}, [], {}, {}, status=status))
    if exit_code is None:
        with pytest.raises(ToolkitError, match=f"^rank 0 was ended by {ended}$"):
            run_launcher(words, tmp_path)
        assert state_of(page) == "killed"
        assert f"Rank 0 was ended by {ended}." in page.read_text()
    else:
        assert run_launcher(words, tmp_path) == exit_code


@pytest.mark.parametrize("value", ["gpu_ids: 0", "main_process_port: abc", "num_machines: '1'"])
def test_values_that_accelerate_cannot_use_are_no_traceback(value: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"distributed_type: FSDP\nnum_processes: 2\n{value}\nfsdp_config: {{fsdp_version: 2}}\n")
    with pytest.raises(BadInputError, match=r"accelerate launch cannot use a value of its config \(\w+Error: "):
        run_launcher(["--config_file", str(config), str(tmp_path / "script.py")], tmp_path)


FORKED = """
import json, os, signal, sys, torch
from toolkit.cli import entry; from toolkit.cli.shared import signals
imported = "toolkit.run.run" in sys.modules
from toolkit.cli.ranks import finetune
def tell(arguments):
    told = [
        int(os.environ["RANK"]), imported, arguments, torch.get_num_threads(),
        str(signal.getsignal(signal.SIGTERM)), signal.getsignal(signal.SIGINT) is signals._on_interrupt
    ]
    os.write(1, (json.dumps(told) + "\\n").encode())  # unlike print, in one piece: the ranks share a pipe
    return os.environ["RANK"] == "1" and eval(os.environ["END"]) or 0
finetune.finetune_command = tell
sys.exit(entry.finetune(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "gpus", "end", "exit_code"),
    [(2, 0, "0", 0), (1, 0, "0", 0), (2, 0, "3", 3), (2, 0, "os.kill(os.getpid(), 9)", None), (2, 2, "2", 2)],
)
def test_ranks_are_forked_from_what_has_imported_all(
    ranks: int, gpus: int, end: str, exit_code: int | None, tmp_path: Path
) -> None:
    """Not if there are GPUs: these ranks are interpreters of their own."""
    (tmp_path / "script.py").write_text(FORKED)
    config = str(ROOT / "accelerate_configs/cpu_2.yaml")
    words = ["--config_file", config, "--num_processes", str(ranks), "--main_process_port", str(free_port())]
    words += [str(tmp_path / "script.py"), "one"]
    code = (
        "import pathlib, sys, torch; from toolkit import Recipe; from toolkit.cli.ranks import launcher\n"
        f"torch.accelerator.device_count = lambda: {gpus}\n"
        "from toolkit.errors import RankLostError\n"
        "try: code = launcher.run_launcher(sys.argv[1:], pathlib.Path('.'), recipe=Recipe.load('quickstart'))\n"
        "except RankLostError as error: sys.exit(str(error))\n"
        "sys.exit(code)"
    )
    (tmp_path / "temporary").mkdir()
    environment = clean_environment(END=end, TMPDIR=str(tmp_path / "temporary"))
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", code, *words]
    ended = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, timeout=LIMIT_SECONDS, env=environment
    )
    assert ended.returncode == (1 if exit_code is None else exit_code), ended.stderr
    assert ("rank 1 was ended by SIGKILL" in ended.stderr) == (exit_code is None)
    left = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("torchelastic_")]
    assert left == [], "torch's launcher leaves an empty folder for each start"
    told = sorted(json.loads(line) for line in ended.stdout.splitlines())
    threads = max(1, (psutil.cpu_count(logical=False) or 1) // ranks)  # Accelerate's choice
    expected = [[rank, gpus == 0, ["one"], threads, str(signal.SIG_DFL), True] for rank in range(ranks)]
    # The launcher ends rank 0, which may have said nothing yet, when rank 1 fails.
    assert told in ([expected] if exit_code == 0 else [expected, expected[:1], expected[1:], []])


@pytest.mark.parametrize(("kind", "forks"), [("FSDP", True), ("NO", False)])
def test_a_rank_that_accelerate_starts_itself_is_not_forked(kind: str, forks: bool, tmp_path: Path) -> None:
    """Nothing would be forked from what this process had imported."""
    config = tmp_path / "one.yaml"
    config.write_text(f"{{compute_environment: LOCAL_MACHINE, distributed_type: '{kind}', num_processes: 1}}")
    assert launcher._can_fork(["--config_file", str(config), "script.py"]) == forks


def test_a_request_for_a_checkpoint_is_handed_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = [
        "import os, signal, sys, time",
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))",
        "os.kill(os.getppid(), signal.SIGUSR1)",
        "time.sleep(20)",
    ]
    script.write_text("\n".join(lines))
    assert run_launcher(["--config_file", str(ROOT / "accelerate_configs/gpu_1.yaml"), str(script)], tmp_path) == 7


def test_ctrl_c_prints_no_line_of_torchs_launcher(tmp_path: Path) -> None:
    """It would stand in the midst of the progress bar."""
    script = tmp_path / "script.py"
    lines = [
        "import os, signal, sys, time",
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(3))",
        "os.environ['RANK'] == '0' and os.kill(os.getppid(), signal.SIGINT)",
        "time.sleep(20)",
    ]
    script.write_text("\n".join(lines))
    words = ["--config_file", str(ROOT / "accelerate_configs/cpu_2.yaml"), str(script)]
    code = (
        "import pathlib; from toolkit.cli.ranks import launcher; "
        f"print(launcher.run_launcher({words}, pathlib.Path('.')))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, timeout=LIMIT_SECONDS, env=clean_environment()
    )
    assert ended.stdout.split() == [str(128 + signal.SIGINT)], ended.stderr
    assert "death signal" not in ended.stderr


def test_json_tells_the_command_and_what_the_run_has_left(launched: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "export").mkdir(parents=True)
    story = Story(last={"step": 2, "value": 2.0}, outcome="held-out loss 5.0000 -> 2.0000")
    story.write(folder)
    result = run("quickstart", "--json", f"training.output_dir={folder}")
    told = json.loads(result.stdout)
    assert told.pop("command") == result.stderr.splitlines()[-1]
    assert told == {
        "exit_code": 3,
        "output_dir": str(folder),
        "record": asdict(story),
        "export_dir": str(folder / "export"),
        "report": None,
    }
    assert result.exit_code == 3
    dry = run("quickstart", "--json", "--dry-run", f"training.output_dir={tmp_path / 'none'}")
    assert set(json.loads(dry.stdout)) == {"command", "exit_code"}


def test_code_0_without_a_run_that_says_it_is_done_is_an_error(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after a function of the user's, or a library, that ends the process of its rank."""

    def ranks(words: list[str], output_dir: Path, *, recipe: Recipe) -> int:
        (output_dir / "export").mkdir(parents=True, exist_ok=True)
        if "training.max_steps=9" in words:
            (output_dir / "finished.json").write_text('{"export": null}')
        return 0

    monkeypatch.setattr(launcher, "run_launcher", ranks)
    score = ["answers.file=asked.jsonl", "answers.compare=mine.py:judge"]
    for name, words, suspect in (
        ("one", [], "; a library has"),
        ("two", score, "; answers.compare (mine.py:judge) or a"),
    ):
        result = run("quickstart", *words, f"training.output_dir={tmp_path / name}")
        assert isinstance(result.exception, ToolkitError)
        assert result.exception.exit_code == 1
        told = str(result.exception)
        assert told.startswith(f"the ranks ended with code 0 before the run was done: {str(tmp_path / name)!r} has no")
        assert suspect in told
    assert run("quickstart", "--dry-run", f"training.output_dir={tmp_path / 'one'}").exit_code == 0
    assert run("quickstart", "training.max_steps=9", f"training.output_dir={tmp_path / 'one'}").exit_code == 0


def test_a_signal_goes_to_a_single_rank_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"  # as a batch system would, to the launcher alone
        "time.sleep(60)\n"
    )
    config = tmp_path / "one.yaml"  # as `accelerate config` writes it for one process, which torchrun does not start
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_machines": 1, "use_cpu": True}
    config.write_text(yaml.safe_dump({**values, "mixed_precision": "no", "num_processes": 1}))
    before = signal.getsignal(signal.SIGTERM)
    assert run_launcher(["--config_file", str(config), str(script)], tmp_path) == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_configs_are_listed_and_copied(tmp_path: Path) -> None:
    rows = json.loads(CliRunner().invoke(app, ["recipes", "configs", "--json"]).output)
    assert {row["name"] for row in rows} == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert all(row["description"].endswith(".") for row in rows)
    copied = CliRunner().invoke(app, ["recipes", "copy", "zero2", str(tmp_path / "mine.yaml")])
    assert copied.exit_code == 0, copied.output
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["fsdp_config"]["fsdp_sharding_strategy"] == "zero2"
    again = CliRunner().invoke(app, ["recipes", "copy", "zero2", str(tmp_path / "mine.yaml")])
    assert "exists" in str(again.exception)


def test_with_json_what_ranks_print_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_on_stderr():
        subprocess.run(["echo", "run: outputs/mine"], check=True)
    subprocess.run(["echo", "{}"], check=True)
    told = capfd.readouterr()
    assert (told.out, told.err) == ("{}\n", "run: outputs/mine\n")


@pytest.mark.parametrize("under_nohup", [False, True])
def test_under_nohup_torchs_launcher_handles_no_closed_terminal(
    under_nohup: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", given.append)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        assert run_launcher(["--num_processes", "2", "script.py"], tmp_path) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    kept = _filter_args(given[0], get_args_parser(), ["script.py"])
    assert ("SIGHUP" in kept.signals_to_handle) == (not under_nohup)
