"""The `toolkit` command and the launch script's own errors, as a user meets them."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.cases import cases
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS
from typer.main import get_command
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.cli.commands import plan as cli_plan
from toolkit.cli.shared.arguments import complete_recipe, load_recipe, split_arguments
from toolkit.errors import RecipeError
from toolkit.recipe.recipe import Recipe, shipped_recipes

TABLES = cases(__file__)

ROOT = Path(__file__).parents[3]
TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = clean_environment(COLUMNS="200", **environment)
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_SECONDS, env=env)


def test_version() -> None:
    printed = run(TOOLKIT, "--version").stdout
    assert printed.startswith("toolkit 0.")
    assert run(sys.executable, "-m", "toolkit", "--version").stdout == printed


def test_recipes_are_listed() -> None:
    table = run(TOOLKIT, "recipes")
    assert table.returncode == 0
    assert "quickstart" in table.stdout
    rows = json.loads(run(TOOLKIT, "recipes", "--json").stdout)
    assert {row["name"] for row in rows} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert all(row["description"] for row in rows)


def test_a_copy_of_each_shipped_recipe_is_the_same_recipe_with_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, shipped in shipped_recipes().items():
        copied = CliRunner().invoke(app, ["recipes", "copy", name, f"others/{name}.yaml"])
        assert copied.exit_code == 0, copied.exception
        values = json.dumps(Recipe.load(f"others/{name}.yaml").model_dump(mode="json"))
        assert json.loads(values.replace(str(tmp_path / "others"), str(ROOT / "recipes"))) == Recipe.load(
            name
        ).model_dump(mode="json")
        text = Path(f"others/{name}.yaml").read_text()
        assert text.replace("others/data/", "recipes/data/") == shipped.read_text()
        for file in re.findall(r"others/(data/[\w.]+\w)", text):  # of the commands in its comments
            assert Path("others", file).read_bytes() == (ROOT / "recipes" / file).read_bytes()
    assert Path("others/data/shapes_tokenizer/tokenizer.json").is_file()
    Path("others/data/requests.jsonl").write_text("mine")
    for words, told in (
        ("quickstart others/quickstart.yaml", "'others/quickstart.yaml' exists"),
        ("quickstart others/again.yaml", "'others/data/requests.jsonl' exists"),
        ("others/lora.yaml mine.yaml", "'others/lora.yaml' is no shipped recipe"),
    ):
        assert told in str(CliRunner().invoke(app, ["recipes", "copy", *words.split()]).exception)
    assert not Path("others/again.yaml").exists()
    assert Path("others/data/requests.jsonl").read_text() == "mine"


def test_help_prints_pages() -> None:
    for topic, page in (("rows", "rows.md"), ("docs/data.md", "data.md"), ("coming_from/trl", "coming_from/trl.md")):
        assert CliRunner().invoke(app, ["help", topic]).output == (ROOT / "docs" / page).read_text() + "\n"
    assert "did you mean 'rows'" in str(CliRunner().invoke(app, ["help", "row"]).exception)
    named = set()
    for path in [*(ROOT / "toolkit").rglob("*.*"), *(ROOT / "recipes").glob("*.yaml")]:
        if path.suffix not in (".py", ".yaml", ".jinja"):
            continue
        text = path.read_text()
        named |= set(re.findall(r"toolkit help ([\w./{}]*\w)", text.replace("{tool}", "trl")))
        strings = re.sub(r'(?s:""".*?""")|(?m:#.*$)', "", text) if path.suffix == ".py" else text
        assert not re.search(r"(?<!help )docs/\w", strings), path
    assert len(named) > 5
    assert {topic: CliRunner().invoke(app, ["help", topic]).exit_code for topic in named} == dict.fromkeys(named, 0)


def test_errors_are_printed_wherever_the_command_runs() -> None:
    """In a pod of Kubeflow all programs have the variables of a rank."""
    failed = run(TOOLKIT, "validate", "nothing", RANK="1", WORLD_SIZE="two", LOCAL_RANK="")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: recipe 'nothing': there is no recipe of that name")


def test_valid_is_a_recipe_whose_files_are_there(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model}}}\ndata: {{train: [{rows}, hf://datasets/a/b/c.jsonl], max_length: 32}}\n"
        "optimizer: {learning_rate: 1e-3}\ntraining: {output_dir: out, max_steps: 1}\n"
    )

    def told(*more: str) -> str:
        result = CliRunner().invoke(app, ["validate", str(recipe), *more])
        return str(result.exception) if result.exception is not None else result.output

    for shown in (told(), told("--json")):
        assert "valid: the keys and the places" in shown, "a store is not asked"
    assert json.loads(told("--json").partition("valid:")[0])["training.max_steps"]["value"] == 1
    for field in ("model.name_or_path", "model.tokenizer", "data.train", "data.validation"):
        assert told(f"{field}=./nowhere.jsonl").startswith(f"{field}: ")
    assert "valid: " in told("model.name_or_path=someone/model", f"data.train={rows}")


def test_validate_shows_values_and_origins() -> None:
    shown = run(TOOLKIT, "validate", "quickstart", "training.max_steps=7", "--json")
    values = json.loads(shown.stdout)
    assert values["training.max_steps"] == {"value": 7, "from": "override"}
    assert values["optimizer.eps"] == {"value": 1e-8, "from": "default"}
    assert values["model.config.model_type"]["from"].endswith("quickstart.yaml")
    set_there, everything = (run(TOOLKIT, "validate", "quickstart", *more).stdout for more in ([], ["--all"]))
    assert "training.num_epochs" in set_there
    assert "optimizer.eps" in everything
    assert "optimizer.eps" not in set_there
    left_out = len(everything.splitlines()) - len(set_there.splitlines()) + 1
    assert f"\n{left_out} more keys have their defaults; --all shows them\nvalid: " in set_there
    assert set_there.startswith(f"recipe: {ROOT / 'recipes/quickstart.yaml'}\n\n")
    lines = dict(line.split(maxsplit=1) for line in set_there.splitlines()[2:-2])
    replaced = run(TOOLKIT, "validate", "quickstart", "training.max_steps=7").stdout
    assert re.search(r"^training\.max_steps +7  # override$", replaced, re.MULTILINE), "the origin, where it differs"
    assert lines["training.seed"] == "0"
    assert lines["data.train"] == json.dumps([str(ROOT / "recipes/data/requests.jsonl")])
    assert set_there.count("quickstart.yaml") == 1


def test_errors_of_a_recipe_name_their_lines(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "# a comment\nmodel:\n  name_or_path: x/y\ndata:\n  train:\n    - a.jsonl\n    - {path: b.jsonl, weigth: 2}\n"
        "  max_lenght: 3\n  batch: 2\noptimizer: {learning_rate: fast, momentum: 1}\ntraining:\n  output_dir: out\n"
        "  max_steps: 4\n  num_epochs: 1\n  seed: q\n"
    )
    found = CliRunner().invoke(app, ["validate", str(recipe), "training.seed=w"]).exception
    assert isinstance(found, RecipeError)
    lines = str(found).splitlines()[1:]
    places = {line.split()[3].rstrip(":"): line.split()[2] for line in lines if line.startswith("  - line ")}
    assert places == {
        "data.train.1.weigth": "7:",
        "data.max_lenght": "8:",
        "data.batch": "9:",
        "optimizer.learning_rate": "10:",
        "optimizer.momentum": "10:",
    }
    assert "  - training.seed: found 'w' (text)" in str(found), "an override has no line"
    assert sum("allowed here: " in line for line in lines) == 2, "the keys of a section are listed once"
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found)


@pytest.mark.parametrize(("text", "tool"), TABLES["OTHERS"])
def test_another_tools_file_is_recognised(text: str, tool: str | None, tmp_path: Path) -> None:
    file = tmp_path / "of another.yaml"
    file.write_text(text)
    told = str(CliRunner().invoke(app, ["validate", str(file)]).exception)
    hint = f"\n  - it looks like a configuration of {tool}; `toolkit help coming_from/{tool}` says"
    assert (hint in told) == (tool is not None), told


def test_editors_have_a_schema_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["recipes", "copy", "quickstart", "before.yaml"]).exit_code == 0
    assert CliRunner().invoke(app, ["recipes", "schema", "--to", "recipe.schema.json"]).exit_code == 0
    assert CliRunner().invoke(app, ["recipes", "copy", "quickstart", "after.yaml"]).exit_code == 0
    line = "# yaml-language-server: $schema=recipe.schema.json\n"
    assert Path("after.yaml").read_text() == line + Path("before.yaml").read_text()
    known = jsonschema.Draft202012Validator(json.loads(Path("recipe.schema.json").read_text()))
    assert json.loads(CliRunner().invoke(app, ["recipes", "schema"]).output) == known.schema
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "recipes").glob("*.yaml")}
    assert {name: [e.json_path for e in known.iter_errors(values)] for name, values in recipes.items()} == {
        name: [] for name in recipes
    }
    wrong = recipes["quickstart"] | {
        "trainning": {},
        "data": {"train": [{"path": "a", "weigth": 1}], "max_length": "long"},
    }
    assert {error.json_path for error in known.iter_errors(wrong)} == {"$", "$.data.train", "$.data.max_length"}


def test_the_script_lists_the_recipes_and_their_errors() -> None:
    script = str(ROOT / "recipes/finetune.py")
    told = run(sys.executable, script, "--help")
    assert told.returncode == 0
    assert "quickstart" in told.stdout
    for arguments, message in (
        (["--recipe", "nothing"], "there is no recipe of that name"),
        (["training.max_step=3"], "did you mean 'max_steps'"),
        (["nothing"], "there is no recipe of that name"),
        (["quickstart", "nonsense"], "expected key.sub=value"),
        (["quickstart", "--recipe", "dpo"], "two recipes are given: 'quickstart' and --recipe dpo"),
    ):
        failed = run(sys.executable, script, *arguments)
        assert failed.returncode == 2, failed
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr


def test_every_command_takes_the_recipe_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without one it is the quickstart."""
    assert split_arguments(["quickstart", "training.seed=7"]) == ("quickstart", ["training.seed=7"])
    assert split_arguments(["training.seed=7"], "dpo") == ("dpo", ["training.seed=7"])
    assert split_arguments(["training.seed=7"]) == ("quickstart", ["training.seed=7"])
    named = tmp_path / "lr=1e-5.yaml"
    named.touch()
    assert split_arguments([str(named), "training.seed=7"]) == (str(named), ["training.seed=7"])
    for command in ("validate", "data", "plan", "verify"):
        options = get_command(app).commands[command].params  # type: ignore[attr-defined]
        assert {"arguments", "as_json"} <= {option.name for option in options}, command
    load_recipe(["quickstart", "training.max_steps=3"])
    assert capsys.readouterr().err == "note: training.num_epochs of the recipe is replaced by training.max_steps\n"


def test_list_and_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).output)
    assert "quickstart" in {row["name"] for row in listed}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    assert complete_recipe("mi") == [], "then the shell completes a path"
    assert complete_recipe("quick") == ["quickstart"]
    assert complete_recipe("training.max_s") == ["training.max_steps="]
    assert complete_recipe("trai") == ["training."]


def every_command(name: str = "", group: Any = None) -> Iterator[str]:
    for word, command in (group or get_command(app)).commands.items():
        yield from every_command(f"{word} ", command) if hasattr(command, "commands") else [f"{name}{word}"]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    app(words, standalone_mode=False, prog_name="toolkit")
    return capsys.readouterr().out


def test_every_command_has_help_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in every_command():
        *groups, word = command.split()
        shown, same = (help_of(words, capsys) for words in ([*groups, word, "-h"], ["help", *groups, word]))
        assert shown == same
        assert f"toolkit {command}" in shown
        assert f" toolkit {command} " in shown.replace("\n", " ").rpartition("Usage:")[2]
    listed = help_of(["-h"], capsys)
    assert [name for name in every_command() if name.split()[0] not in listed] == []


@pytest.mark.parametrize(("line", "found"), TABLES["COMPLETED"])
def test_options_complete(line: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder/a.yaml", "folder/a.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words = {"COMP_WORDS": f"toolkit {line}", "COMP_CWORD": str(len(line.split()))}
    answer = CliRunner().invoke(app, prog_name="toolkit", env={"_TOOLKIT_COMPLETE": "complete_bash", **words})
    assert answer.output.split() == found


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_prints_an_error(rank: str) -> None:
    code = (
        "import sys; from toolkit.cli.shared import console; from toolkit.cli.ranks import finetune; "
        "console.PATIENCE_SECONDS = 0.1; "
        "sys.exit(finetune.finetune_command(['--recipe', 'nothing']))"
    )
    failed = run(sys.executable, "-c", code, RANK=rank, WORLD_SIZE="2")
    assert failed.returncode == 2
    assert bool(failed.stderr) == (rank == "0")


@pytest.mark.parametrize(("command", "rank", "told"), TABLES["FIRST"])
def test_the_first_word_comes_before_torch_is_imported(command: str, rank: str, told: str | None) -> None:
    code = (
        "import sys; from toolkit.cli import app; from toolkit.cli.shared import console; "
        "from toolkit.cli.ranks import finetune; console.PATIENCE_SECONDS = 0.1; "
        f"sys.modules['torch'] = None; sys.argv = ['toolkit', 'train', 'quickstart', '--cpu', '2']; {command}"
    )
    failed = run(sys.executable, "-c", code, RANK=rank, WORLD_SIZE="2")
    assert "torch" in failed.stderr.splitlines()[-1], "it fails where torch is imported"
    first = failed.stderr.splitlines()[0]
    assert first == told if told else not first.startswith("started")
    if command.startswith("app"):  # the launcher has read the config, and needs no torch for it
        assert failed.stderr.splitlines()[1].startswith("ACCELERATE_USE_CPU=true accelerate launch --config_file")


@pytest.mark.parametrize(("words", "told"), TABLES["WORDS"])
def test_training_says_a_word_before_it_imports_anything(words: str, told: str) -> None:
    code = (
        "import sys; from toolkit.cli import entry; before = set(sys.modules); import atexit\n"
        "class Stop:\n"
        "    def find_spec(self, *_): sys.exit(7)\n"
        f"sys.argv = ['toolkit', {words}]; sys.meta_path.insert(0, Stop()); entry.main()"
    )
    ended = run(sys.executable, "-c", code)
    assert (ended.returncode, ended.stderr) == (7, told)


def test_plan_takes_ranks_on_the_cpu_as_train_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        cli_plan, "_plan_recipe", lambda recipe, hardware, ranks, config: seen.append((hardware.name, ranks))
    )
    monkeypatch.setattr(cli_plan, "_print_plan", lambda *args: None)
    CliRunner().invoke(app, ["plan", "quickstart", "--cpu", "2"])
    assert seen == [("cpu", 2)]
