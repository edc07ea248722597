"""The trainer's own promises: non-finite losses, evaluation, epochs, precision, trackers, export in files."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.ranks import meet, run_on_ranks
from support.runs import finetuned, records_of
from support.texts import make_texts
from support.tiny import recipe_values, save_llama, with_sections
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("training")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    save_llama(folder / "model", texts, tied=True)
    poisoned = load_file(folder / "model/model.safetensors")
    poisoned["model.norm.weight"].fill_(3e38)  # the weights are finite, the logits are not
    broken = save_llama(folder / "broken", texts, tied=True)
    from safetensors.torch import save_file

    save_file(poisoned, broken / "model.safetensors", metadata={"format": "pt"})
    held_out = "".join(json.dumps({"text": text}) + "\n" for text in make_texts(20, seed=5))
    (folder / "held_out.jsonl").write_text(held_out)
    return folder


def runs(folder: Path, data: Path) -> dict[str, Any]:
    import toolkit.run.stages.accelerator
    import toolkit.training.trainer
    from toolkit import Recipe
    from toolkit.errors import ToolkitError
    from toolkit.run.run import rehearse

    results: dict[str, Any] = {}

    def run(name: str, model: str = "model", **sections: dict[str, Any]) -> None:
        values = recipe_values(folder / model, data, folder / name, folder / "cache")
        values = with_sections(values, sections)
        values["training"] = {key: value for key, value in values["training"].items() if value is not None}
        try:
            results[name] = finetuned(values)
        except ToolkitError as error:
            results[name] = (type(error).__name__, str(error), error.exit_code)

    run("broken-run", model="broken", training={"max_non_finite_steps": 2})
    run(
        "epochs",
        data={"validation": str(folder / "held_out.jsonl"), "shuffle": True},
        training={"max_steps": None, "num_epochs": 1.5, "micro_batch_size": 3, "eval_every_steps": 4},
        logging={"trackers": ["tensorboard"]},
        export={"max_shard_gib": 0.0001},
    )
    run("bf16", training={"mixed_precision": "bf16", "max_steps": 3}, export={"dtype": "bfloat16"})
    run("profiled", training={"max_steps": 4, "profile_steps": [2, 3], "max_grad_norm": None})
    counted: list[list[float]] = []
    total = toolkit.training.trainer.Trainer._sum_over_ranks
    toolkit.training.trainer.Trainer._sum_over_ranks = lambda trainer, values: (
        counted.append(values) or total(trainer, values)
    )
    run("no-export", training={"max_steps": 2, "max_grad_norm": None}, export={"enabled": False})
    results["counted"] = len(counted)
    toolkit.run.stages.accelerator.Compilation = functools.partial(
        toolkit.run.stages.accelerator.Compilation, "aot_eager"
    )  # inductor takes a minute
    run("compiled", training={"max_steps": 2, "compile": True}, sharding={"strategy": "ddp"}, export={"enabled": False})
    for name in ("dry", "no-export"):
        meet()
        recipe = Recipe.from_mapping(recipe_values(folder / "model", data, folder / name, folder / "cache"))
        with contextlib.redirect_stderr(io.StringIO()) as told:
            try:
                rehearse(recipe)
            except ToolkitError as error:
                print(error, file=told)
        results[f"rehearsed-{name}"] = told.getvalue()
    return results


@pytest.fixture(scope="module")
def results(folder: Path, text_file: Path) -> list[dict[str, Any]]:
    return run_on_ranks(runs, 2, folder, text_file)


def test_a_non_finite_loss_stops_the_run_with_step_ranks_and_rate(folder: Path, results: list[dict[str, Any]]) -> None:
    for found in results:
        kind, text, exit_code = found["broken-run"]
        assert (kind, exit_code) == ("TrainingError", 1)
        assert "step 2: non-finite loss on rank 0, 1" in text
        assert "learning rate" in text
    lines = records_of(folder / "broken-run")
    assert [(line["step"], line["loss"], line["non_finite"]) for line in lines] == [(1, None, True), (2, None, True)]


def test_epochs_end_with_the_last_sample(results: list[dict[str, Any]]) -> None:
    result = results[0]["epochs"]
    train = [record for record in result.metrics if record["split"] == "train"]
    report = json.loads((result.output_dir / "data_report.json").read_text())
    positions = round(1.5 * report["train"]["samples"])
    assert train[-1]["samples"] == positions
    assert train[-1]["epoch"] == pytest.approx(1.5, abs=0.02)
    assert len(train) == -(-positions // 6)


def test_evaluation_is_the_mean_over_held_out_targets(folder: Path, results: list[dict[str, Any]]) -> None:
    result = results[0]["epochs"]
    evaluations = [record for record in result.metrics if record["split"] == "eval"]
    steps = [record["step"] for record in result.metrics if record["split"] == "train"]
    assert [record["step"] for record in evaluations] == sorted({0, *range(4, len(steps), 4), len(steps)})
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(result.export_dir, dtype=torch.float32)
    for network, record in ((model, evaluations[0]), (exported, evaluations[-1])):
        loss_sum, count = _plain_loss(network, folder / "held_out.jsonl", folder)
        assert record["target_tokens"] == count
        assert record["loss"] == pytest.approx(loss_sum / count, rel=1e-6)
    assert result.final_eval_loss < result.initial_eval_loss


@torch.no_grad()
def _plain_loss(model: torch.nn.Module, held_out: Path, folder: Path) -> tuple[float, int]:
    """The sum over the held-out texts' tokens, piece by piece, each piece alone; and how many tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for line in held_out.read_text().splitlines():
        document = tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
        for start in range(0, len(document) - 1, 31):
            ids = torch.tensor([document[start : start + 32]])
            picked = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[0, 1:, None])
            total -= float(picked.sum())
            count += ids.shape[1] - 1
    return total, count


def test_the_export_in_several_files_loads(results: list[dict[str, Any]]) -> None:
    result = results[0]["epochs"]
    files = sorted(result.export_dir.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((result.export_dir / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert result.logits_difference < 1e-6
    tokenizer = AutoTokenizer.from_pretrained(result.export_dir)
    assert tokenizer.eos_token_id is not None
    assert AutoModelForCausalLM.from_pretrained(result.export_dir).config.architectures == ["LlamaForCausalLM"]


def test_the_run_folder(results: list[dict[str, Any]], folder: Path) -> None:
    result = results[0]["epochs"]
    names = {path.name for path in result.output_dir.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "data_report.json", "report.html", "export"} <= names
    assert not [name for name in names if "unfinished" in name]
    lines = records_of(result.output_dir)
    assert lines == result.metrics
    keys = {"split", "step", "epoch", "samples", "tokens", "target_tokens", "loss", "grad_norm", "learning_rate"}
    keys |= {f"{what}_per_second" for what in ("tokens", "padded_tokens", "targets", "samples")}
    keys |= {"step_seconds", "peak_device_bytes", "peak_host_bytes", "mfu", "planned_peak_bytes"}
    assert set(next(line for line in lines if line["split"] == "train")) == keys
    page = (result.output_dir / "report.html").read_text()
    assert "zero3" in page
    assert list(result.output_dir.rglob("events.out.tfevents*")), "the tracker got nothing"


def test_bf16_keeps_float32_masters_and_exports_bf16(results: list[dict[str, Any]]) -> None:
    result = results[0]["bf16"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(result.export_dir / "model.safetensors").values())
    assert result.logits_difference < 5e-2
    losses = [record["loss"] for record in result.metrics]
    reference = [r["loss"] for r in results[0]["no-export"].metrics]
    assert losses[:2] == pytest.approx(reference, rel=2e-2)


def test_without_export_and_clipping(results: list[dict[str, Any]]) -> None:
    result = results[0]["no-export"]
    assert result.export_dir is None
    assert not (result.output_dir / "export").exists()
    assert all(record["grad_norm"] > 0 for record in result.metrics)


def test_a_profile_leaves_a_trace_and_the_losses_alone(results: list[dict[str, Any]]) -> None:
    result = results[0]["profiled"]
    losses = [record["loss"] for record in result.metrics]
    assert losses[:2] == [record["loss"] for record in results[0]["no-export"].metrics]
    for rank in range(2):
        names = {
            event["name"]
            for event in json.loads((result.output_dir / f"profile/rank_{rank}.json").read_text())["traceEvents"]
        }
        assert {"toolkit.data", "toolkit.update", "aten::mm"} <= names


def test_a_compiled_run_says_so_and_trains_the_same(results: list[dict[str, Any]]) -> None:
    result = results[0]["compiled"]
    expected = [record["loss"] for record in results[0]["no-export"].metrics]
    assert [record["loss"] for record in result.metrics] == pytest.approx(expected, rel=1e-5)
    assert "each block compiled (aot_eager)" in (result.output_dir / "report.html").read_text()


def test_targets_are_counted_a_step_ahead(results: list[dict[str, Any]]) -> None:
    """Only the first step has an exchange of its own for them; parity with a plain loop shows that they are right."""
    assert [found["counted"] for found in results] == [1, 1]


def test_the_export_has_a_model_card(folder: Path, results: list[dict[str, Any]]) -> None:
    result = results[0]["epochs"]
    card = (result.export_dir / "README.md").read_text()
    header, _, body = card.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(header) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["finetune-toolkit", "causal_lm"],
    }
    assert "# epochs" in body
    assert "fine-tuned from model." in body
    assert f"{result.final_eval_loss:.4g}" in body
    assert "held_out.jsonl" in body
    assert str(folder) not in card, "nobody else's business"
    recipe = yaml.safe_load(body.partition("````yaml\n")[2].partition("````")[0])
    assert recipe["training"]["num_epochs"] == 1.5


def with_new_tokens(folder: Path, data: Path) -> dict[str, Any]:
    found = {}
    for name in ("tied", "untied"):
        values = recipe_values(folder / name, data, folder / f"new-{name}", folder / "cache-new", max_steps=1)
        values["model"]["add_tokens"] = ["<|im_start|>", "<|im_end|>", "<extra>"]
        values["optimizer"] = {"learning_rate": 1e-9, "weight_decay": 0.0}
        found[name] = finetuned(values).logits_difference
    return found


def test_embeddings_get_rows_for_added_tokens(tmp_path: Path, text_file: Path) -> None:
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    for name in ("tied", "untied"):
        save_llama(tmp_path / name, texts, tied=name == "tied")
    found = run_on_ranks(with_new_tokens, 2, tmp_path, text_file)[0]
    for name in ("tied", "untied"):
        assert found[name] < 1e-6
        before = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        after = AutoModelForCausalLM.from_pretrained(tmp_path / f"new-{name}/export")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / f"new-{name}/export")
        old = len(before.get_input_embeddings().weight)
        assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<extra>"]) == [old, old + 1, old + 2]
        for layer in ("get_input_embeddings", "get_output_embeddings"):
            rows, first = getattr(after, layer)().weight, getattr(before, layer)().weight
            assert rows.shape[0] == after.config.vocab_size == old + 3
            torch.testing.assert_close(rows[:old], first, rtol=0, atol=1e-6)
            assert float((rows[old:] - first.mean(dim=0)).abs().max()) < float(first.abs().max())
        tied = after.get_input_embeddings().weight is after.get_output_embeddings().weight
        assert tied == (name == "tied")


def test_a_dry_run_checks_all_and_leaves_nothing(folder: Path, results: list[dict[str, Any]]) -> None:
    told = results[0]["rehearsed-dry"]
    assert re.search(r"^ *memory: .+$", told, re.MULTILINE), told
    assert re.search(r"^  input_ids \(\d+, \d+\)$", told, re.MULTILINE), told
    assert "dry run: nothing was trained" in told
    assert not (folder / "dry").exists()
    assert results[1]["rehearsed-dry"] == "", "only rank 0 prints"
    assert all("already holds a finished run" in result["rehearsed-no-export"] for result in results)
