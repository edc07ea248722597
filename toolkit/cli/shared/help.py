"""Help texts of the commands: what a command does, its arguments, its options in groups, and an example.

They are plain text as wide as the terminal allows. docs/generate.py writes the same words to docs/cli.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 100
"""Columns. Longer lines are harder to read, however wide the terminal is."""

VALUES = {int: "N", float: "NUMBER", Path: "PATH"}
"""Type of an option -> the word that stands for its value."""

OPTIONS = "Options"
"""The group of options for which no other one is named."""


class Described(NamedTuple):
    """An argument or option in words. `group` is None for an argument."""

    words: str
    default: str
    about: str
    group: str | None


class HelpedCommand(TyperCommand):
    """A command whose help has its options in groups (`rich_help_panel`) and an example (`epilog`)."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help text."""
        formatter.write_usage(ctx.command_path, f"{usage(self)} [options]".strip())
        _write_about(self, formatter)
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in described(self):
            default = {"": "", "required": " Required."}.get(one.default, f" Default: {one.default}.")
            default = "" if one.group is None else default
            groups.setdefault(one.group or "Arguments", []).append((one.words, f"{one.about}{default}"))
        groups.setdefault(OPTIONS, []).append(("-h, --help", "Print this help."))
        _write_groups(groups, formatter)
        if self.epilog:
            with formatter.section("Example"):
                formatter.write(f"{' ' * formatter.current_indent}{self.epilog}\n")


class HelpedGroup(TyperGroup):
    """A group of commands. `help COMMAND` prints the help of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments, after `help train` has become `train --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands, in their groups."""
        formatter.write_usage(ctx.command_path, "COMMAND [arguments] [options]")
        _write_about(self, formatter)
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            about = " ".join((command.help or "").split("\n\n")[0].split())
            group = panel if isinstance(panel, str) else "Commands"
            groups.setdefault(group, []).append((name, re.split(r"(?<=\.) |(?<=[:;]) ", about)[0].rstrip(":;.") + "."))
        groups[OPTIONS] = [
            *((one.words, one.about) for one in described(self)),
            ("-h, --help", f"Print this help. {ctx.command_path} help COMMAND: that of a command."),
        ]
        _write_groups(groups, formatter)
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")


def usage(command: Any) -> str:
    """Returns the arguments of a command as they are typed, such as `MODEL DATA`."""
    given = [one for one in command.params if one.param_type_name == "argument"]
    return " ".join(_placeholder(one) if one.required or one.metavar else f"[{_placeholder(one)}]" for one in given)


def described(command: Any) -> Iterator[Described]:
    """Describes the arguments and options of a command, in order."""
    kinds = annotated_types(command)
    for one in command.params:
        if one.param_type_name == "argument":
            yield Described(_placeholder(one), "required" if one.required else "", one.help or "", None)
        elif "--help" not in one.opts:
            value = _value_word(kinds.get(one.name), one.metavar)
            words = ", ".join([*one.opts, *one.secondary_opts])
            panel = one.rich_help_panel if isinstance(one.rich_help_panel, str) else OPTIONS
            yield Described(f"{words} {value}".strip(), _default_text(one), one.help or "", panel)


def annotated_types(command: Any) -> dict[str, Any]:
    """Returns name -> type of the parameters of a command, without `None`."""
    callback = getattr(command, "callback", None)
    hints = get_type_hints(callback, include_extras=True) if callback is not None else {}
    kinds = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
    return {name: _inner(kind) for name, kind in kinds.items()}


def _inner(kind: Any) -> Any:
    """Returns the type of a value, or of an item of a list."""
    kind = (
        next((one for one in get_args(kind) if one is not type(None)), kind) if get_origin(kind) is not list else kind
    )
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _placeholder(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _value_word(kind: Any, given: str | None) -> str:
    return given or ("" if kind in (bool, None) else VALUES.get(kind, "TEXT"))


def _default_text(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return str(option.show_default)
    if option.secondary_opts:
        return str((option.opts if option.default else option.secondary_opts)[0])
    return "" if option.default in (None, False) else str(option.default)


def _write_about(command: Any, formatter: Any) -> None:
    for paragraph in (command.help or "").split("\n\n"):
        formatter.write("\n")
        formatter.write_text(" ".join(paragraph.split()))


def _write_groups(groups: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for title, rows in groups.items():
        with formatter.section(title):
            formatter.write_dl(rows)


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
"""Of all groups and commands."""


def new_app(cls: type[HelpedGroup] = HelpedGroup, **settings: Any) -> typer.Typer:
    """Returns an app whose help is written here, and whose errors are plain lines."""
    return typer.Typer(cls=cls, rich_markup_mode=None, context_settings=SETTINGS, **settings)
