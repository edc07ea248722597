"""Weights that are not those of the configuration are an error, and so are files without any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import save_llama, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from toolkit.errors import BadInputError
from toolkit.model.load import LoadedModel, _build, _name_labels, load
from toolkit.paths import fingerprint_of
from toolkit.recipe.schema import ModelSection

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "model", ["a king and a queen"], tied=False)


def loaded(folder: Path, labels: list[str] | None = None, **section: Any) -> LoadedModel:
    kind = "causal_lm" if labels is None else "sequence_classification"
    source = ModelSection(name_or_path=str(folder), **section)
    model = load(source, AutoTokenizer.from_pretrained(folder), 0, labels, objective=kind)
    model.load_weights(None)
    return model


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def without_head(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def renamed(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"net.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: change(f, without_head), r"1 are missing .* random: lm_head.weight"),
        (
            lambda f: change(f, lambda t: t.update(extra=torch.ones(2))),
            "1 are in its files, and have no place .*: extra",
        ),
        (lambda f: change(f, renamed), r"(?s)21 are missing .*21 are in its files.*net\.lm_head"),
        (lambda f: configure(f, num_hidden_layers=3), r"9 are missing .*model\.layers\.2\."),
        (lambda f: configure(f, num_hidden_layers=1), r"9 are in its files.*model\.layers\.1\."),
    ],
)
def test_weights_of_another_model_are_listed(folder: Path, spoil: Callable[[Path], None], told: str) -> None:
    spoil(folder)
    with pytest.raises(BadInputError, match=told) as error:
        loaded(folder)
    assert "model.allow_new_weights" in str(error.value)


def in_two_files(folder: Path, names: tuple[str, str], factor: float) -> None:
    """Writes the weights once more, times a factor, behind an index."""
    tensors, files = load_file(folder / "model.safetensors"), {}
    for place, name in enumerate(names):
        part = {key: factor * tensors[key] for key in sorted(tensors)[place::2]}
        save_file(part, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("has_single", [True, False])
def test_files_are_chosen_as_transformers_does(has_single: bool, folder: Path) -> None:
    """One file comes before an index beside it, which may be an earlier save's; an index may name any files."""
    alone = fingerprint_of(folder)
    in_two_files(folder, ("weights-a.safetensors", "b.safetensors"), 3.0)
    if not has_single:
        (folder / "model.safetensors").unlink()
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder).state_dict(), loaded(folder).model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert (fingerprint_of(folder) == alone) == has_single
    assert fingerprint_of(folder) is not None
    if has_single:
        (folder / "b.safetensors").unlink()
        loaded(folder)


def test_new_weights_that_are_meant_are_drawn(folder: Path) -> None:
    change(folder, without_head)
    model = loaded(folder, allow_new_weights=["lm_head.*"])
    assert 0 < model.model.lm_head.weight.std() < 1
    configure(folder, num_hidden_layers=1)
    loaded(folder, allow_new_weights=["lm_head.*", "model.layers.1.*"])


def test_a_classifiers_head_is_new_and_its_language_model_must_be_whole(folder: Path) -> None:
    assert loaded(folder, labels=["good", "bad"]).fit.describe() == (
        "1 drawn at random: score.weight; 1 left unused: lm_head.weight"
    )
    change(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(BadInputError, match=r"1 are missing .*model\.norm\.weight"):
        loaded(folder, labels=["good", "bad"])


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"", b"\xff" * 300, None, "cut"],
    ids=["lfs", "empty", "random", "no file", "cut short"],
)
def test_files_that_hold_no_weights_are_told(folder: Path, content: bytes | str | None) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    fix = "Download the model again, or name a folder" if content is None else "is a Git-LFS pointer"
    with pytest.raises(BadInputError, match=f"cannot be read: .*{fix}"):
        loaded(folder)


@pytest.mark.parametrize(("kind", "own", "expected"), [("llama", 0, 2), ("llama", None, 2), ("roberta", 1, 1)])
def test_decoders_look_behind_the_padding_of_the_batches(kind: str, own: int | None, expected: int) -> None:
    """Of an encoder a mask tells, and where RoBERTa's positions begin must not move."""
    config = AutoConfig.for_model(kind, pad_token_id=own)
    _name_labels(config, ["bad", "good"], SimpleNamespace(pad_token_id=2, eos_token_id=3))  # type: ignore[arg-type]
    assert config.pad_token_id == expected


def test_a_trained_head_in_another_order_is_told() -> None:
    def others(own: list[str], names: list[str], kind: str = "LlamaForSequenceClassification") -> list[str]:
        config = AutoConfig.for_model("llama", id2label=dict(enumerate(own)), architectures=[kind])
        found = _name_labels(config, names, SimpleNamespace(pad_token_id=2, eos_token_id=3))  # type: ignore[arg-type]
        assert config.id2label == dict(enumerate(names))
        return found

    with pytest.raises(BadInputError, match=r"order GOOD, no, .* no, good; set objective\.labels=\[good, 'no'\]$"):
        others(["GOOD", "no"], ["no", "good"])
    assert others(["good", "bad"], ["x", "y"]) == ["good", "bad"]
    for names in (["good", "bad"], ["Good", "BAD"], ["0", "1"], ["bad", "neutral", "good"], ["score"]):
        assert others(["good", "bad"], names) == []
    assert others(["LABEL_0", "LABEL_1"], ["x", "y"]) == []
    assert others(["LABEL_0", "LABEL_1"], ["x", "y"], "LlamaForTokenClassification") == ["LABEL_0", "LABEL_1"]


def test_a_head_for_other_classes_is_drawn_anew_if_that_is_meant(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, id2label={0: "bad", 1: "good"})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    with pytest.raises(BadInputError, match=r"1 are of a head for other classes \(bad, good\), .*: score\.weight"):
        loaded(folder, ["x", "y"])
    for labels, is_new in ((["bad", "good"], False), (["x", "y"], True)):
        found = loaded(folder, labels, allow_new_weights=["score.*"])
        different = [name for name, value in found.model.state_dict().items() if not value.equal(stored[name])]
        assert different == found.fit.drawn == ["score.weight"] * is_new


@pytest.mark.parametrize(("kind", "asked"), [("gemma2", "sdpa"), ("bloom", "flash_attention_2")])
def test_an_attention_that_a_type_does_not_have_is_blamed_on_its_field(kind: str, asked: str) -> None:
    with pytest.raises(
        BadInputError, match=rf"^model\.attention: {asked} cannot be used: .*; set model\.attention=auto$"
    ):
        _build(AutoModelForCausalLM, tiny_config(kind), {"attn_implementation": asked}, "model.name_or_path")
