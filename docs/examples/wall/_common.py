"""What the programs of this folder share: ranks, small files, a run of the toolkit, and the line that each prints."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedModel, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from toolkit import finetune  # noqa: E402
from toolkit.errors import StoppedError  # noqa: E402
from toolkit.ranks import free_port  # noqa: E402

VOCABULARY, END = 64, 1
WORDS = ["t0", "<end>", *(f"t{token}" for token in range(2, VOCABULARY))]
"""A token is a word. The second ends a text, and pads, as in SmolLM2."""

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": END, "eos_token_id": END}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": None}
"""Of a small model of Llama's kind; large first weights make differences large."""

torch.set_num_threads(1)
disable_progress_bar()


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[END], pad_token=WORDS[END])


def text(row: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in row)


def unequal_rows(count: int, longest: int = 24) -> list[list[int]]:
    """Rows of 3 to `longest` tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


def save(model: PreTrainedModel, folder: str) -> str:
    """The model with its tokenizer, as a user has it; returns the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def on_ranks(function: Callable[..., Any], *arguments: Any, count: int = 2) -> Any:
    """What the first of `count` forked ranks returns from `function(*arguments)`: a number, or little more.

    What the ranks print is shown only if one fails.

    Raises:
        SystemExit: a rank failed.
    """
    fork, port = multiprocessing.get_context("fork"), str(free_port())
    answers = fork.SimpleQueue()

    def rank_main(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for stream in (1, 2):
            os.dup2(told.fileno(), stream)
        answer = function(*arguments)
        if rank == 0:
            answers.put(answer)

    ranks = [fork.Process(target=rank_main, args=(rank,)) for rank in range(count)]
    with tempfile.TemporaryFile("w+") as told:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            told.seek(0)
            sys.stderr.write(told.read())
            raise SystemExit("a rank failed")
    return answers.get()


def run_recipe(recipe: dict[str, Any], folder: str, ranks: int = 2, before: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Trains by the toolkit in `folder`; the records of its metrics file.

    Args:
        recipe: section -> field -> value; the rows are `data.train` as a list, which is written to a file.
        before: a function and its arguments, called on each rank before the run.
    """
    rows = Path(folder, "rows.jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in recipe["data"]["train"]), encoding="utf-8")
    data = {"max_length": 64, "shuffle": False, "cache_dir": f"{folder}/cache"} | recipe["data"] | {"train": str(rows)}
    training = {"output_dir": f"{folder}/run", "max_steps": 1, "micro_batch_size": 1} | recipe.get("training", {})
    path = Path(folder, "recipe.json")  # which YAML reads, too
    whole = {"optimizer": {"learning_rate": 1e-3}} | recipe | {"data": data, "training": training}
    path.write_text(json.dumps(whole), encoding="utf-8")
    on_ranks(_train, path, before, count=ranks)
    metrics = Path(training["output_dir"], "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in metrics.splitlines()]


def _train(path: Path, before: Sequence[Any]) -> None:
    if before:
        before[0](*before[1:])
    with contextlib.suppress(StoppedError):  # a stop that was asked for, with the state saved
        finetune(path)


def show(what: str, *, peer: float, right: float, ours: float) -> None:
    """Prints the line that docs/wall.md has a row for, and that its test reads."""
    print(f"{what}: peer {peer:.6g}, right {right:.6g}, ours {ours:.6g}")
