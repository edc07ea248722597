"""The command `toolkit generate`: answers a prompt, a conversation or a file, and counts the right answers."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.progress import track

from toolkit.data.rows.examples import Message
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Completion, encode_prompt, stream
from toolkit.generation.text.evaluation import Evaluation, evaluate, has_function, scoring_of, summary
from toolkit.generation.text.heads import Scores, has_head, score_rows
from toolkit.generation.text.image_prompts import asked_of, encode_with_images, require_images
from toolkit.generation.text.load import Loaded, ModelPlace, find_model, load_model
from toolkit.generation.text.options import Options, Sampling, encodable
from toolkit.generation.text.rows import PromptRow, completions, encode_rows, read_rows
from toolkit.pages.parts.story import read_story
from toolkit.terminal import Terminal

BATCH_SIZE = 8
"""Prompts of a file in one batch, unless the options say otherwise."""


def run(options: Options) -> None:
    """Runs the command with these options, and prints the result.

    Raises:
        BadInputError: if a model, a prompt or a file cannot be used.
        ToolkitError: if the model fails.
    """
    place = find_model(options.source)
    if options.evaluation is not None and has_head(place):
        _score_rows(place, options, options.evaluation)
        return
    if options.evaluation is not None and options.output is not None:
        raise BadInputError(
            "--to: with --eval it takes what a classifier or a reward model says; --json has mismatches"
        )
    path = options.file or options.evaluation
    # Before the model: a bad row or image is reported within a second, and loading takes much longer.
    is_scored = has_function(options.compare)
    rows = [] if path is None else read_rows(path, _mode_of(options), options.evaluation is not None, is_scored)
    images = require_images(options.images)
    if place.on_hub:
        _print_notice(f"{place.name}: a hub model, which is downloaded the first time")
    with load_for(options) as loaded, _open_output(options.output, options.file, "--file") as write:
        if options.prompt is not None:
            _answer_prompt(loaded, options, options.prompt, images)
        elif options.chat:
            _chat(loaded, options)
        elif options.file is not None:
            _answer_rows(loaded, options, rows, write)
        else:
            _evaluate_rows(loaded, options, rows, write)


def scored(place: ModelPlace, options: Options, file: Path) -> Scores:
    """Scores the rows of a file with a model that has a head.

    Raises:
        BadInputError: if an option has no effect, or the model or rows cannot be used.
    """
    idle = {"--raw": options.raw, "--system": options.system, "--compare": options.compare}
    if (option := next((name for name, given in idle.items() if given), None)) is not None:
        raise BadInputError(f"{option} has no effect on {place.name!r}, which writes no text; leave it out")
    with quiet():
        return score_rows(place, file, options.batch_size or BATCH_SIZE, options.dtype, options.device)


def _score_rows(place: ModelPlace, options: Options, file: Path) -> None:
    with _open_output(options.output, file, "--eval") as write:
        found = scored(place, options, file)
        for row in found.predictions if options.output is not None else []:
            write(json.dumps(row, ensure_ascii=False))
    _print_limits(Path(place.name), file)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if options.as_json else "\n".join(found.lines()))


def _mode_of(options: Options) -> str:
    return "--file" if options.file is not None else "--eval"


@contextmanager
def load_for(options: Options) -> Iterator[Loaded]:
    """Loads the model that the options name; libraries are quiet until the block ends."""
    with quiet():
        loaded = load_model(options.source, options.dtype, options.device)
        from toolkit.data.templates.stops import turn_ends

        if not options.raw and loaded.tokenizer.chat_template is not None and not turn_ends(loaded.tokenizer):
            _print_notice(
                "the chat template closes no turn with a special token: answers may go on up to --max-new-tokens"
            )
        yield loaded


def _answer_prompt(loaded: Loaded, options: Options, text: str, images: Sequence[Path]) -> None:
    try:
        if images:
            prompt = encode_with_images(loaded, asked_of(text, len(images)), images, options.system)
        else:
            prompt = encode_prompt(loaded, text, options.system, options.raw)
    except BadInputError as problem:
        raise BadInputError(f"{'--image' if images else '--prompt'}: {problem}") from None
    stream(loaded, prompt, options.sampling, _show)
    _show("\n")


def _answer_rows(loaded: Loaded, options: Options, rows: list[PromptRow], write: Callable[[str], None]) -> None:
    for row, found in zip(rows, _completions(loaded, options, rows), strict=True):
        write(json.dumps({"prompt": row.given, "completion": found.text}, ensure_ascii=False))


def _evaluate_rows(loaded: Loaded, options: Options, rows: list[PromptRow], write: Callable[[str], None]) -> None:
    found = evaluated(loaded, options, rows)
    _print_limits(Path(loaded.name), options.evaluation)
    write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if options.as_json else summary(found))


def _print_limits(folder: Path, file: Path | None) -> None:
    for limit in read_story(folder).limits or read_story(folder.parent.parent).limits:  # of a checkpoint: its run's
        _print_notice(f"of the run, {limit}: with these in {file}, the accuracy is too high")


def evaluated(loaded: Loaded, options: Options, rows: list[PromptRow]) -> Evaluation:
    """Counts the rows that the model answers right.

    Raises:
        BadInputError: names rows that cannot be encoded.
    """
    scoring = scoring_of(rows, options.compare, "--compare", None if options.raw else loaded.tokenizer)
    return evaluate(rows, _completions(loaded, options, rows), scoring)


def _completions(loaded: Loaded, options: Options, rows: list[PromptRow]) -> Iterable[Completion]:
    """Completes the rows, with a bar if nothing else is written to the terminal."""
    prompts = encode_rows(loaded, rows, _mode_of(options), options.system, options.raw)
    size = options.batch_size or BATCH_SIZE
    busy = options.file is not None and options.output is None
    return track(
        completions(loaded, prompts, options.sampling, size),
        "generating",
        total=len(prompts),
        console=Terminal(soft_wrap=False),
        transient=True,
        disable=busy or not sys.stderr.isatty(),
    )


def _chat(loaded: Loaded, options: Options) -> None:
    if loaded.tokenizer.chat_template is None:
        raise BadInputError(
            f"--chat: the tokenizer of {loaded.name!r} has no chat template; use --prompt, or train with "
            "data.chat_template"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        # One odd byte must not end the conversation.
        sys.stdin.reconfigure(errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines)
    _print_notice("/reset: forget the conversation; /quit: end")
    try:
        converse(loaded, options.sampling, options.system, _read_line, _show)
    except KeyboardInterrupt:
        print()


def converse(
    loaded: Loaded,
    sampling: Sampling,
    system: str | None,
    read: Callable[[], str | None],
    write: Callable[[str], object],
) -> None:
    """Runs a conversation until the user writes `/quit` or `read`, which returns the next line, returns None."""
    messages: list[Message] = []
    while (line := read()) is not None and line.strip() != "/quit":
        if line.strip() == "/reset":
            messages.clear()
            _print_notice("the conversation is forgotten")
        elif line.strip():
            messages += _next_messages(loaded, sampling, system, [*messages, {"role": "user", "content": line}], write)


def _next_messages(
    loaded: Loaded, sampling: Sampling, system: str | None, messages: list[Message], write: Callable[[str], object]
) -> list[Message]:
    """Returns a conversation's last message and the answer to it; nothing if it cannot be answered."""
    try:
        prompt = encode_prompt(loaded, messages, system)
    except BadInputError as problem:
        _print_notice(f"{problem}; /reset forgets the conversation")
        return []
    # Each turn draws numbers of its own.
    answer = stream(loaded, replace(prompt, row=len(messages)), sampling, write)
    write("\n")
    return [messages[-1], {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        return encodable(input("> " if is_terminal else ""))
    except EOFError:
        print("\n" if is_terminal else "", end="")
        return None


def _show(text: str) -> None:
    """Writes to stdout at once, with a question mark for each character that its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def _print_notice(line: str) -> None:
    """Prints a line for people."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _open_output(output: Path | None, source: Path | None, mode: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes lines to stdout, or to a file that appears once it is whole.

    Raises:
        BadInputError: if the file cannot be written, or is the one that is read.
    """
    if output is None:
        yield partial(print, flush=True)
        return
    if source is not None and output.exists() and output.samefile(source):
        raise BadInputError(f"--to: {str(output)!r} is the file of {mode}; name another one")
    # In the same folder, so that the rename at the end stays within one file system.
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        if output.exists() and not output.is_file():
            raise OSError(errno.EEXIST, "it exists and is not a file")
        output.parent.mkdir(parents=True, exist_ok=True)
        file = unfinished.open("w", encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"--to: {str(output)!r} cannot be written: {error.strerror}; name another file") from error
    try:
        with file:
            yield partial(print, file=file)
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides bars and warnings of the libraries."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # the hub's, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
