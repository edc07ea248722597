"""Model folders that are broken in one place each: a dry run refuses them with one clear error, or takes them for a
reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import cases
from support.refusals import Outcome, finetune, toolkit, unclear
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from toolkit.errors import BadInputError
from toolkit.paths import user_cache
from toolkit.supervise.output_place import require_place

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Spoil = Callable[[Path], object]


def configured(**fields: Any) -> Spoil:
    """config.json with other fields; None takes one out."""
    return lambda folder: rewritten(folder / "config.json", fields)


def tokenized(**fields: Any) -> Spoil:
    """The same of tokenizer.json."""
    return lambda folder: rewritten(folder / "tokenizer.json", fields)


def set_of_tokenizer(**fields: Any) -> Spoil:
    """tokenizer_config.json with other fields."""
    return lambda folder: rewritten(folder / "tokenizer_config.json", fields)


def rewritten(path: Path, fields: dict[str, Any]) -> None:
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in values.items() if fields.get(key, "") is not None}))


def written(name: str, content: str | bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def changed(edit: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """The weights, after `edit`."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def indexed(index: str) -> Spoil:
    """Weights in two files with this index of them, or what should be one."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        (folder / INDEX).write_text(index)

    return spoil


def as_folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def without(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def quantised(method: str) -> Spoil:
    return configured(quantization_config={"quant_method": method, "bits": 4, "group_size": 128})


WAYS: dict[str, Callable[..., Spoil]] = {
    way.__name__: way
    for way in (configured, tokenized, set_of_tokenizer, written, indexed, as_folder, without, cut, quantised)
}
NORM, HEAD = "model.norm.weight", "lm_head.weight"
TABLES = cases(__file__)
"""Name -> a way to spoil a folder, its arguments, and what the error names, or why it is trained all the same."""


def spoiled_by(table: str) -> dict[str, tuple[Spoil, str]]:
    rows = TABLES[table].items()
    return {
        name: (WAYS[way](**given) if isinstance(given, dict) else WAYS[way](*given), says)
        for name, (way, given, says) in rows
    }


REFUSED = spoiled_by("REFUSED") | {
    "weights in 8 bits": (
        changed(lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)})),
        f"in 8 bits, as in quantised models, without the scales that they need: {HEAD};",
    ),
    "a norm with a NaN": (
        changed(lambda t: t[NORM][3].fill_(float("nan"))),
        f"1 of the weights of {{folder}} hold numbers that are not finite: {NORM};",
    ),
    "a matrix with an infinity": (
        changed(lambda t: t["model.layers.1.mlp.up_proj.weight"][0, 0].fill_(float("inf"))),
        "not finite: model.layers.1.mlp.up_proj.weight;",
    ),
    "weights that link to themselves": (
        lambda folder: (folder / WEIGHTS).unlink() or (folder / WEIGHTS).symlink_to(WEIGHTS),
        "the weights of",
    ),
    "complex weights": (changed(lambda t: t.update({HEAD: t[HEAD].to(torch.complex64)})), HEAD),
    "a norm of no dimension": (changed(lambda t: t.update({NORM: torch.tensor(1.0)})), NORM),
    "config begins with a mark of bytes": (
        lambda folder: (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes()),
        "config.json",
    ),
    "initial range that is no number": (configured(initializer_range=float("nan")), "initializer_range"),
    "weights as whole numbers": (
        changed(lambda t: t.update({n: w.char() for n, w in t.items()})),
        "stored as integers",
    ),
    "a norm of another size": (changed(lambda t: t.update({NORM: torch.ones(7)})), f"{NORM} [7] for [48]"),
    "a weight too many": (changed(lambda t: t.update(extra=torch.ones(2))), "extra"),
    "a pickle without weights": (pickled, "are pickled (pytorch_model.bin), and a pickle can run code"),
}
FILES_WITHOUT_WEIGHTS = {"weights are a pointer", "weights are cut", "index of another file"}
"""Those that may be pointers of Git-LFS."""

DESCRIBED: dict[str, str] = TABLES["DESCRIBED"]
"""Fields of `model.config` for a Llama of 4 heads, and what the error says."""

TAKEN = spoiled_by("TAKEN") | {
    "one matrix zero": (
        changed(lambda t: t["model.layers.0.mlp.up_proj.weight"].zero_()),
        "some models begin with layers that add nothing",
    ),
    "a norm of zeros": (changed(lambda t: t[NORM].zero_()), "Gemma's norms add 1 to theirs"),
    "config says a key twice": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace("{", '{"hidden_size": 48, ', 1)
        ),
        "JSON's last one holds, in every reader",
    ),
    "weights in 64 bits": (changed(lambda t: t.update({HEAD: t[HEAD].double()})), "they are rounded to model.dtype"),
}


Folder = Callable[[], Path]


@pytest.fixture
def good(place: Path) -> Folder:
    """Makes a copy of the good model in place of the last one."""

    def make() -> Path:
        shutil.rmtree(place / "copy", ignore_errors=True)
        return Path(shutil.copytree(place / "model", place / "copy"))

    return make


def dry_run(folder: Path, *overrides: str) -> Outcome:
    return finetune(str(folder.parent / "recipe.yaml"), f"model.name_or_path={folder}", *overrides, "--dry-run")


def test_refused_models(good: Folder) -> None:
    def outcomes() -> Iterator[tuple[object, Outcome, str]]:
        for name, (spoil, named) in REFUSED.items():
            folder = good()
            spoil(folder)
            outcome = dry_run(folder)
            # A mend for another fault sends people off: files that are there and whole need no `git lfs pull`.
            assert ("Git-LFS" in outcome.told) == (name in FILES_WITHOUT_WEIGHTS), outcome.told
            yield name, outcome, named.replace("{folder}", repr(str(folder)))

    assert unclear(outcomes()) == []


def test_refused_descriptions(place: Path) -> None:
    sizes = ["model_type=llama", "hidden_size=48", "num_attention_heads=4", "num_key_value_heads=2"]

    def outcome(setting: str) -> Outcome:
        fields = dict(each.split("=") for each in [*sizes, "intermediate_size=96", "num_hidden_layers=2", setting])
        described = f"model.config={{{', '.join(f'{key}: {value}' for key, value in fields.items())}}}"
        tokenizer = f"model.tokenizer={place / 'model'}"
        return finetune(str(place / "recipe.yaml"), "model.name_or_path=null", described, tokenizer, "--dry-run")

    assert unclear((setting, outcome(setting), named) for setting, named in DESCRIBED.items()) == []


def test_taken_models(good: Folder) -> None:
    for name, (spoil, why) in TAKEN.items():
        spoil(folder := good())
        outcome = dry_run(folder)
        assert outcome.code == 0, (name, why, outcome.told)


def test_what_is_drawn_at_random_or_left_unused_is_told(good: Folder) -> None:
    folder = good()
    changed(lambda t: t.update(extra=t.pop(HEAD)))(folder)
    told = dry_run(folder, "model.allow_new_weights=[lm_head.*, extra]").told
    assert "weights: 1 drawn at random: lm_head.weight; 1 left unused: extra\n" in told
    assert "weights:" not in dry_run(good()).told


@pytest.mark.parametrize("through_one_rank", [False, True])
def test_a_matrix_of_zeros_is_told_and_a_norm_that_is_not_finite_refused_wherever_they_are_read(
    through_one_rank: bool, good: Folder
) -> None:
    """Rank 0 reads for all where the files lack something that is meant to be new."""
    folder, down = good(), "model.layers.0.mlp.down_proj.weight"
    changed(lambda t: [t[down].zero_(), *([t.pop(HEAD)] if through_one_rank else [])])(folder)
    arguments = ["model.allow_new_weights=[lm_head.*]"] * through_one_rank
    assert f"1 nothing but zeros: {down}\n" in dry_run(folder, *arguments).told
    adapted = dry_run(folder, *arguments, "adapter.kind=lora", "export.merge=true")
    assert f"1 nothing but zeros: {down}\n" in adapted.told, "and not the adapters"
    changed(lambda t: t[NORM].fill_(float("nan")))(folder)
    assert dry_run(folder, *arguments).problems(f"not finite: {NORM};") == []


@pytest.mark.parametrize("kind", ["preference", "reward"])
def test_each_side_of_a_pair_has_all_positions_of_the_model(kind: str, place: Path, tmp_path: Path) -> None:
    """Those of GPT-2 are a table, in which a position beyond the last one, also of padding, is an error."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    config = GPT2Config(n_positions=24, n_embd=16, n_layer=1, n_head=2, vocab_size=len(tokenizer), pad_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(place / "gpt2")
    tokenizer.save_pretrained(place / "gpt2")
    (place / "recipe_of_pairs.yaml").write_text((place / "recipe.yaml").read_text().replace("rows.", "pairs."))

    def outcome(longest: int, *settings: str) -> Outcome:
        pair = {"prompt": "a", "chosen": " king" * longest, "rejected": " moon" * 18}
        (place / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 4)
        model = [f"model.name_or_path={place / 'gpt2'}", f"objective.kind={kind}", "export.enabled=false"]
        run = [f"training.output_dir={tmp_path / str(longest)}", "training.max_steps=2", *settings]
        return finetune(str(place / "recipe_of_pairs.yaml"), *model, *run)

    trained = outcome(18, "data.max_length=48")
    assert trained.code == 0, trained.told
    named = "data.max_length: 49 is more than the model's 24 positions (max_position_embeddings) for each of the 2 "
    assert outcome(19, "data.max_length=49").problems(named) == []
    assert outcome(25, "data.max_length=48").problems("data.train: one side of a row has ") == []


def test_a_name_that_no_repository_has(place: Path) -> None:
    file, data = str(place / "recipe.yaml"), str(place / "rows.jsonl")
    commands: list[Callable[[str], Outcome]] = [
        lambda name: finetune(file, f"model.name_or_path={name}", "--dry-run"),
        lambda name: finetune(file, f"model.tokenizer={name}", "--dry-run"),
        lambda name: finetune(file, "objective.kind=distillation", f"objective.teacher={name}", "--dry-run"),
        lambda name: toolkit("plan", file, f"model.name_or_path={name}", "--cpu", "1"),
        lambda name: toolkit("data", file, f"model.name_or_path={name}"),
        lambda name: toolkit("validate", file, f"model.name_or_path={name}"),
        lambda name: toolkit("init", "--cpu", "1", "--to", str(place / "new.yaml"), "--", name, data),
        lambda name: toolkit("generate", "--prompt", "x", "--", name),
    ]
    names = ["my model", "C:\\models\\llama", "qwen3:8b", "a-", "org/.x", "a..b/c", "org/x.git", "-x"]
    tried = [(command, names[number % len(names)]) for number, command in enumerate(commands)]
    named = "does not exist; name a model's folder or a hub name, which looks like Qwen/Qwen3-8B"
    assert (
        unclear((name, command(f"'{name}'" if command in commands[:6] else name), named) for command, name in tried)
        == []
    )
    rows, long = toolkit("data", file, "data.train='my rows'"), toolkit("merge", "x" * 300, "--to", str(place / "m"))
    assert rows.problems("there is no file 'my rows', and the hub allows no such name") == []
    assert long.problems("is too long for the name of a file") == []


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-like-this").expanduser())
    with pytest.raises(BadInputError, match="this user has no home; set HOME or XDG_CACHE_HOME"):
        user_cache()
    require_place(Path("/somewhere/else"))
