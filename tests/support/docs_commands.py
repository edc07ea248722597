"""The commands that README and docs print: found in their blocks, checked against the programs that they call.

A block of commands is a fence of bash, or lines indented by four spaces, and a command begins with one of PROGRAMS. A
comment above a block says that it `runs here` or what it needs, as in `<!-- needs the network -->`. Every command is
checked: its options, recipes, keys and files must exist. Those of `toolkit` that start no ranks are run as well, with
STAND_INS for what a reader has.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cli.shared.arguments import RECIPE, split_arguments
from toolkit.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
PROGRAMS = ("toolkit", "accelerate", "torchrun", "python", "pip", "pytest", "srun")
RUN_ELSEWHERE = ("train", "verify", "doctor", "status", "serve-check")
"""Commands of `toolkit` that start ranks, or look at running ones or at a server, and have tests of their own."""
STAND_INS = {
    "meta-llama/Llama-3.1-8B": "model",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "model",
    "Qwen/Qwen2.5-1.5B-Instruct": "model",
    "sentence-transformers/all-MiniLM-L6-v2": "model",
    "outputs/chat": "outputs/notes",
    "outputs/quickstart": "outputs/notes",
    "outputs/sweep-*": "outputs",
    "outputs/calls": "outputs/notes",
    "outputs/hand": "outputs/notes",
    "outputs/tools": "outputs/lora",
    "outputs/dpo/export": "outputs/notes",
    "s3://bucket/runs/first": "outputs/notes",
    "--checkpoint 400": "--checkpoint 4",
}
"""What a page names -> what a test has in its place."""
MARK = re.compile(r"<!-- (.+) -->")
SHELL_VARIABLE = re.compile(r"\$\(\(.+?\)\)|\$[A-Z_]+")


@dataclass(frozen=True)
class Printed:
    """A command of a page.

    Attributes:
        mark: what the page says that it needs; empty where it says nothing.
    """

    page: str
    words: tuple[str, ...]
    mark: str

    @property
    def arguments(self) -> list[str] | None:
        """Of `toolkit`, with stand-ins; None for another program, for what starts ranks and for what needs a GPU."""
        program, *arguments = self.words
        if program != "toolkit" or arguments[0] in RUN_ELSEWHERE or self.mark == "needs a GPU":
            return None
        line = shlex.join(arguments)
        for theirs, ours in STAND_INS.items():
            line = line.replace(theirs, ours)
        return shlex.split(line)


def printed(page: Path) -> Iterator[Printed]:
    """The commands of a page, in order."""
    fence: str | None = None
    mark = ""
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence = line[3:] if fence is None else None
        elif fence == "bash" or (fence is None and line.startswith("    ")):
            for words in commands(line):
                yield Printed(str(page.relative_to(ROOT)), words, mark)
        elif fence is None and line:
            found = MARK.fullmatch(line)
            mark = found[1] if found else ""


def commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line of the shell, without its comment and without what isn't of PROGRAMS."""
    if not line.strip().startswith(PROGRAMS):
        return
    lexer = shlex.shlex(SHELL_VARIABLE.sub("1", line.strip()), posix=True, punctuation_chars="&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "&&"]:
        if word != "&&":
            words.append(word)
            continue
        if words[:3:2] == ["srun", "-c"]:
            yield from commands(words[3])
        elif words:
            yield tuple(words)
        words = []


def check(words: tuple[str, ...]) -> None:
    """Fails where a command of PROGRAMS has an option, a recipe, a key or a file that doesn't exist."""
    program, *arguments = words
    {"toolkit": check_toolkit, "accelerate": check_accelerate, "torchrun": check_torchrun, "pip": check_pip}.get(
        program, check_files
    )(arguments)


def check_toolkit(arguments: list[str]) -> None:
    from typer.main import get_command

    from toolkit.cli.app import app

    command: Any = get_command(app)
    context = command.make_context("toolkit", list(arguments))
    while hasattr(command, "commands") and (rest := [*context._protected_args, *context.args]):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    if any(parameter.metavar == RECIPE for parameter in command.params):
        given = [value for value in context.params.values() if isinstance(value, list | tuple)]
        Recipe.load(*split_arguments(given[0] if given else [], context.params.get("recipe")))


def check_accelerate(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    if arguments == ["config"]:
        return
    assert arguments[0] == "launch", arguments
    given = launch_command_parser().parse_args(arguments[1:])
    if given.config_file is not None:
        assert Path(given.config_file).is_file(), given.config_file
    check_script(given.training_script, given.training_script_args)


def check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(arguments)
    check_script(given.training_script, given.training_script_args)


def check_script(script: str, arguments: list[str]) -> None:
    from toolkit.cli.ranks.finetune import _argument_parser

    assert Path(script).is_file(), script
    if Path(script).name == "finetune.py":
        given = _argument_parser().parse_intermixed_args(arguments)
        Recipe.load(*split_arguments(given.arguments, given.recipe))


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install", arguments
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for asked in re.findall(r"\[(.+?)\]", " ".join(arguments)):
        assert set(asked.split(",")) <= set(extras), asked


def check_files(arguments: list[str]) -> None:
    for word in arguments:
        if word.endswith((".py", ".yaml")):
            assert Path(word).exists(), word
