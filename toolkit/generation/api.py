"""The commands `toolkit generate` and `toolkit sample` as functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from toolkit.data.rows.examples import Message
from toolkit.generation.sampling.sample_options import SampleOptions
from toolkit.generation.sampling.sampled_rows import Sampled
from toolkit.generation.sampling.sampling import sample as sampled
from toolkit.generation.text.command import BATCH_SIZE, evaluated, load_for, scored
from toolkit.generation.text.evaluation import Evaluation, has_function
from toolkit.generation.text.heads import Scores, has_head
from toolkit.generation.text.load import find_model
from toolkit.generation.text.options import Options
from toolkit.generation.text.rows import completions, encode_rows, read_rows, row_of
from toolkit.paths import file_of_rows


@overload
def generate(source: str | Path, prompts: str, **options: object) -> str: ...
@overload
def generate(source: str | Path, prompts: list[str] | list[list[Message]], **options: object) -> list[str]: ...
def generate(source: str | Path, prompts: str | list[str] | list[list[Message]], **options: object) -> str | list[str]:
    """Returns a model's completion of a prompt, or of each of several.

    Args:
        source: folder of a run, an export or an adapter, or a hub name.
        prompts: each a text or a conversation's messages, whose parts may be images: their bytes, or paths in the
            current folder.
        options: `raw`, `system`, `max_new_tokens`, `temperature`, `top_p`, `seed`, `batch_size`, `dtype`, `device`, as
            the command's options of these names.

    Raises:
        BadInputError: if a model, a prompt or an option cannot be used.
    """
    # A file of prompts in all but where they come from: what holds for --file holds here.
    chosen = Options(str(source), file=Path("prompts"), **options)  # type: ignore[arg-type]
    texts: list[str | list[Message]] = [prompts] if isinstance(prompts, str) else [*prompts]
    rows = [row_of(f"prompt {number}", prompt) for number, prompt in enumerate(texts, 1)]
    with load_for(chosen) as loaded:
        encoded = encode_rows(loaded, rows, "prompts", chosen.system, chosen.raw)
        size = chosen.batch_size or BATCH_SIZE
        found = [completion.text for completion in completions(loaded, encoded, chosen.sampling, size)]
    return found[0] if isinstance(prompts, str) else found


def evaluate(source: str | Path, rows: Any, **options: object) -> Evaluation | Scores:
    """Counts the rows that a model answers right.

    Args:
        source: as in `generate`.
        rows: a `.jsonl` file, a list of mappings or a `datasets.Dataset`, with a prompt and an `answer`; if a function
            scores, no answer is needed. A classifier, a tagger or a reward model takes rows as in its training.
        options: `compare`, `raw`, `system`, `max_new_tokens`, `batch_size`, `dtype`, `device`, as the command's options
            of these names.

    Raises:
        BadInputError: if a model, a file or an option cannot be used.
    """
    scores = has_head(place := find_model(str(source)))
    rows = rows if scores or isinstance(rows, str | Path | Mapping) else [*rows]
    file = Path(rows if isinstance(rows, str | Path) else file_of_rows(rows))
    chosen = Options(str(source), evaluation=file, **options)  # type: ignore[arg-type]
    if scores:
        return scored(place, chosen, file)
    read = read_rows(file, "--eval", with_answers=True, is_scored=has_function(chosen.compare))
    with load_for(chosen) as loaded:
        return evaluated(loaded, chosen, read)


def sample(source: str | Path, prompts: str | Path, to: str | Path, **options: object) -> Sampled:
    """Writes several completions of each prompt of a file, scores them, and makes training rows of them.

    If a launcher has started ranks and their process group exists, each rank writes a share.

    Args:
        source: as in `generate`.
        prompts: rows with a prompt and an `answer`; with a `reward` or a function none is needed.
        to: folder of the files; a call continues the files of an earlier one.
        options: `samples`, `reward`, `compare`, `raw`, `system`, `max_new_tokens`, `temperature`, `top_p`, `seed`,
            `batch_size`, `dtype`, `device`, as the command's options of these names.

    Raises:
        BadInputError: if a model, a file or an option cannot be used, or the folder was begun with other ones.
    """
    return sampled(SampleOptions(str(source), Path(prompts), Path(to), **options))  # type: ignore[arg-type]
