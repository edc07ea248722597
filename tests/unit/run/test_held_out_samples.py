"""What the model writes after held-out prompts while a run trains, and what that costs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, llama
from transformers import AutoModelForSeq2SeqLM, BartConfig

from toolkit.data.kinds.source_target import SourceTargetSamples
from toolkit.data.samples.samples import RowPrompt, TextSamples
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.run.parts.answers import TEXTS, Continuations, _unanswered
from toolkit.run.stages.stages import ReportExtras


def run_of(model: Any, tokenizer: Any, samples: Any) -> Any:
    """A run on one process, as far as continuations ask for it."""
    spec = SimpleNamespace(encoder_decoder=model.config.is_encoder_decoder)
    recipe = SimpleNamespace(
        model=SimpleNamespace(name_or_path="model"),
        objective=SimpleNamespace(spec=spec),
        training=SimpleNamespace(compile=False),
        sharding=SimpleNamespace(tensor=1),
    )
    plugin = SimpleNamespace(strategy=SimpleNamespace(sharded=False))
    opened = SimpleNamespace(
        recipe=recipe, plugin=plugin, accelerator=SimpleNamespace(autocast=nullcontext), shown=ReportExtras()
    )
    data = SimpleNamespace(validation=samples)
    return SimpleNamespace(opened=opened, model=model, inner=model, tokenizer=tokenizer, data=data, num_steps=9)


def trainer_at(step: int, beats: list[None] | None = None) -> Any:
    beats = [] if beats is None else beats
    return SimpleNamespace(global_step=step, check_stop=lambda: None, enter_phase=lambda _: beats.append(None))


def continuations_of(run: Any, prompts: list[RowPrompt], records: Any = ()) -> Continuations:
    """Of a run that begins, or goes on after these records."""
    metrics: Any = SimpleNamespace(records=records, progress=SimpleNamespace(line=lambda *_: None))
    found = Continuations(run, metrics, prompts)
    found.before_training(trainer_at(0))
    return found


@torch.no_grad()
def test_a_token_costs_a_forward_of_itself_and_the_text_is_that_of_whole_forwards() -> None:
    torch.manual_seed(0)
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE)
    model = llama(vocab_size=VOCAB_SIZE, max_position_embeddings=128).train()
    asked = [tokenizer(text)["input_ids"] for text in ("by the river and the old town", "a fox")]
    samples = TextSamples(*[None] * 6)  # type: ignore[arg-type]
    run = run_of(model, tokenizer, samples)
    widths: list[int] = []
    beats: list[None] = []
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda _module, args, _output: widths.append(args[0].shape[1]))
    extension = continuations_of(run, [RowPrompt(ids, []) for ids in asked])
    found = extension.at_evaluation(trainer_at(0, beats))[TEXTS]
    handle.remove()
    longest = max(map(len, asked))
    # The prompts once, each further token once, and a trial of one prompt with and without padding. Without a cache it
    # would be 40 forwards of `longest` + 40 tokens.
    assert [width for width in widths[2:] if width > 1] == [longest]
    assert widths.count(1) == 39
    assert len(beats) == len(widths)
    assert model.training
    model.eval()
    for ids, text in zip(asked, found, strict=True):
        row = list(ids)
        while len(row) < len(ids) + 40:
            row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
            if row[-1] in tokenizer.all_special_ids:
                row.pop()
                break
        assert text == tokenizer.decode(row[len(ids) :])


def test_a_target_that_begins_with_a_special_token_is_shown() -> None:
    """As BART's targets do, and mBART's with their language."""
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(
        BartConfig(
            **sizes, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
            vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=1, decoder_start_token_id=0,
            bos_token_id=tokenizer.bos_token_id, forced_eos_token_id=None,
        )
    ).eval()  # fmt: skip
    model.generation_config.forced_bos_token_id = tokenizer.bos_token_id
    model.final_logits_bias[0, tokenizer.all_special_ids] = -100.0  # so that its end does not come first
    source, target = (tokenizer(text)["input_ids"] for text in ("by the river", "a fox"))
    samples = SourceTargetSamples(None, np.arange(1), 64, 1, 16)  # type: ignore[arg-type]
    run = run_of(model, tokenizer, samples)
    prompt = RowPrompt(source, [tokenizer.bos_token_id, *target, 0])
    [text] = continuations_of(run, [prompt]).at_evaluation(trainer_at(0))[TEXTS]
    written = model.generate(torch.tensor([source]), max_new_tokens=15, do_sample=False, num_beams=1)[0, 1:].tolist()
    assert written[0] == tokenizer.bos_token_id
    end = next((place for place, token in enumerate(written) if place and token in tokenizer.all_special_ids), None)
    assert text == tokenizer.decode(written[1:end])
    assert text
    assert _unanswered(run, prompt).expected == "a fox"


def test_the_report_has_the_texts_of_all_evaluations_also_of_those_before_a_resume() -> None:
    """A resumed run has them in its records; with more prompts than before, it shows what is written from there on."""
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE)
    run = run_of(llama(vocab_size=VOCAB_SIZE, max_position_embeddings=128), tokenizer, TextSamples(*[None] * 6))  # type: ignore[arg-type]
    prompts = [RowPrompt(tokenizer(text)["input_ids"], []) for text in ("by the river", "a fox")]
    records = [{"step": step, TEXTS: [f"{step} a", f"{step} b"]} for step in (0, 3, 6, 9)] + [{"step": 5}]
    extension = continuations_of(run, prompts, records)
    first, second = run.opened.shown.side_by_side
    assert (first.before, first.between, first.after) == ("0 a", [(3, "3 a"), (6, "6 a")], None)
    assert (second.prompt, second.before) == ("a fox", "0 b")
    run.opened.shown.exported_step = 6
    extension.after_last_step()
    assert [one.after for one in run.opened.shown.side_by_side] == ["6 a", "6 b"]
    continuations_of(run, [*prompts, prompts[0]], records)
    assert [(one.before, one.between) for one in run.opened.shown.side_by_side] == 3 * [(None, [])]
