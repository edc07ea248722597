"""Wrong fields, values and overrides of a recipe: `toolkit validate` refuses each with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.refusals import key_of, toolkit

REFUSED = """
model.name_or_path=3
model.name_or_path=[a]
model.name_or_path=''
model.config=3
model.config={}
model.config=[llama]
model.config.model_type=
model.config.model_type=3
model.revision=main
model.dtype=fp8
model.dtype=16
model.dtype=float64
model.attention=flash
model.attention=2
model.allow_new_weights=lm_head
model.allow_new_weights=[1]
model.allow_new_weights=[]
model.trust_remote_code=maybe
model.trust_remote_code=1
model.tokenizer=3
model.tokenizer=''
model.add_tokens=<a>
model.add_tokens=[1]
model.add_tokens=[]
model.train_tokenizer_vocab_size=10
model.train_tokenizer_vocab_size=512.5
model.train_tokenizer_vocab_size=many
model.nmae_or_path=x
model=llama
data.train=
data.train=[]
data.train=''
data.train=3
data.train=[3]
data.train={}
data.train={path: 3}
data.train={path: a.jsonl, wieght: 3}
data.train=[{path: a.jsonl, wieght: 3}]
data.train=[{path: a.jsonl, weight: -1}, {path: b.jsonl, weight: 1}]
data.train=[{path: a.jsonl, weight: .nan}, {path: b.jsonl, weight: 1}]
data.train=[{path: a.jsonl, weight: 1}, b.jsonl]
data.train={path: a.jsonl, weight: 2}
data.train={path: a.jsonl, split: test}
data.train=[[a.jsonl]]
data.validation=[]
data.validation=0.1
data.validation={path: a.jsonl, weight: 1}
data.validation_fraction=0
data.validation_fraction=1
data.validation_fraction=-0.1
data.validation_fraction=10%
data.columns=text
data.columns.txt=body
data.columns.text=3
data.chat_template=llama3
data.chat_template=true
data.targets=user
data.max_length=0
data.max_length=-1
data.max_length=1e9
data.max_length=1000000000
data.max_length=128.5
data.max_length=long
data.max_length=null
data.max_length=true
data.add_bos=maybe
data.max_dropped_fraction=2
data.max_dropped_fraction=-1
data.max_dropped_fraction=.nan
data.long_rows=cut
data.packing=auto
data.packing=1
data.streaming=fast
data.shuffle=42
data.max_validation_samples=0
data.num_proc=0
data.num_proc=-4
data.num_proc=two
data.cache_dir=5
data.cahce_dir=x
objective.kind=dpo
objective.kind=null
objective.loss=kto
objective.loss=dpo
objective.beta=0.1
objective.labels=[a, b]
objective.class_weights=balanced
adapter.kind=qlora
adapter.r=8
adapter.r=0
adapter.dropout=1
adapter.alpha=-1
adapter.target_modules=3
sharding.strategy=zero4
sharding.strategy=zero3+offload
sharding.unit_classes=LlamaDecoderLayer
sharding.activation_checkpointing=0
sharding.activation_checkpointing=true
sharding.activation_checkpointing=all
sharding.prefetch=0
sharding.offload=cpu
sharding.offload=true
sharding.offload_checkpoints=true
sharding.chunk_tokens=4096
sharding.chunk_tokens=0
sharding.offload_executor=gpu
sharding.device_state_gib=-1
checkpoint.to=memory://runs/first
optimizer.kind=adam
optimizer.kind=sgd
optimizer.learning_rate=0
optimizer.learning_rate=-1e-4
optimizer.learning_rate=.nan
optimizer.learning_rate=.inf
optimizer.learning_rate=high
optimizer.learning_rate=null
optimizer.learning_rate='1e-4'
optimizer.lr=1e-4
optimizer.weight_decay=-0.1
optimizer.beta1=1
optimizer.beta2=1.5
optimizer.eps=0
optimizer.momentum=0.9
schedule.kind=step
schedule.warmup_steps=-1
schedule.warmup_steps=1.5
schedule.warmup_fraction=1.5
schedule.min_factor=2
schedule.min_factor=-0.1
schedule.decay_fraction=0.1
training.output_dir=
training.output_dir=''
training.output_dir=[a]
training.max_steps=0
training.max_steps=-5
training.max_steps=1.5
training.max_steps=ten
training.max_steps=1e3
training.num_epochs=0
training.num_epochs=-1
training.num_epochs=.inf
training.micro_batch_size=0
training.micro_batch_size=auto
training.gradient_accumulation_steps=0
training.max_grad_norm=0
training.max_grad_norm=-1
training.mixed_precision=fp8
training.mixed_precision=yes
training.mixed_precision=bfloat16
training.compile=max-autotune
training.seed=-1
training.seed=1.5
training.seed=4294967296
training.seed=100000000000000000000
training.seed=random
training.eval_every_steps=0
training.max_steps=9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999
training.max_steps=9007199254740993
training.gradient_accumulation_steps=999999999999999999999999999999
checkpoint.every_steps=9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999
logging.every_steps=9999999999999999999
training.output_dir="a\\0b"
model.name_or_path="a\\0b"
data.cache_dir="a\\0b"
logging.project_name="\\0"
training.profile_steps=[3]
training.profile_steps=[5, 3]
training.profile_steps=[1, 100]
training.profile_steps=5
training.max_non_finite_steps=0
training.epochs=3
checkpoint.every_steps=0
checkpoint.every_minutes=0
checkpoint.every_minutes=-5
checkpoint.every_minutes=half an hour
checkpoint.every_minutes=.nan
checkpoint.every_minutes=.inf
checkpoint.every_minutes=false
checkpoint.keep_last=0
checkpoint.keep_every=3
checkpoint.keep_best=yes please
checkpoint.asynchronous=2
checkpoint.resume=true
checkpoint.resume=null
checkpoint.time_limit_minutes=0
checkpoint.time_limit_minutes=1h
logging.every_steps=0
logging.trackers=wandb
logging.trackers=[weights]
training.patience=0
logging.sample_prompt=3
logging.sample_max_new_tokens=0
export.enabled=2
export.dtype=int8
export.max_shard_gib=0
export.max_shard_gib=5GB
export.merge=true
trainig.max_steps=3
max_steps=3
description=[a]
answers.max_new_tokens=0
answers.max_new_tokens=-1
answers.max_new_tokens=many
answers.max_new_tokens=3
answers.batch_size=0
answers.batch_size=1.5
answers.every_evaluations=0
answers.every_evaluations=often
answers.extract='('
answers.extract=''
answers.extract=3
answers.numeric=maybe
answers.structured=3
answers.strict=always
answers.raw=2
answers.system=''
answers.system=3
answers.file=''
answers.file=[a.jsonl]
answers.files=a.jsonl
training.best_by=answer_accuracy
training.best_by=3
data.template_date=today
data.template_date=3
data.template_date=2026-11
data.template_date=[2026]
data.template_date=20261126
data.template_date=2026-11-26T10:00:00
data.template_date=99999-01-01
data.template_arguments=3
data.template_arguments=[a]
data.template_arguments=text
data.template_arguments={}
data.template_arguments={1: 2}
data.train=[{path: a.jsonl, name: a b}]
data.train=[{path: a.jsonl, name: ''}]
data.train=[{path: a.jsonl, name: a/b}]
data.train=[{path: a.jsonl, name: 3}]
data.train=[{path: a.jsonl, name: [a]}]
data.train=[{path: '', name: a}]
data.train=s3://user:secret@bucket/a.jsonl
data.train=https://user:secret@host/a.jsonl
data.image_root=''
data.image_root=3
data.min_pixels=0
data.min_pixels=many
data.max_pixels=-1
data.max_pixels=1.5
data.max_target_length=1
data.max_target_length=long
data.source_prefix=''
data.columns.messages=[a]
data.columns.margin=0.5
data.columns.tags={a: b}
data.long_rows=null null
data.shuffle=yes please
data.validation=[{path: 3}]
data.validation=''
checkpoint.to=s3://
checkpoint.to=s3://bucket/
checkpoint.to=gs://
checkpoint.to=file://relative
checkpoint.to=http://host/run
checkpoint.to=S3://bucket/run
checkpoint.to=s3:/bucket/run
checkpoint.to=s3://user:secret@bucket/run
checkpoint.to=''
checkpoint.to=3
checkpoint.to=[s3://bucket/run]
checkpoint.keep_best=true
checkpoint.time_limit_minutes=-1
checkpoint.time_limit_minutes=.inf
adapter.kind=lora adapter.alpha=1e308
adapter.start_from=exports/a
adapter.start_from=3
adapter.modules_to_save=[lm_head]
adapter.double_quantization=true
export.max_shard_gib=.inf
export.max_shard_gib=.nan
export.max_shard_gib=-1
export.max_shard_gib=1e300
export.push_to_hub=name
export.push_to_hub=a/b/c
export.push_to_hub=3
export.hub_private=false
logging.held_out_samples=-1
logging.held_out_samples=many
logging.held_out_samples=1.5
logging.project_name=3
logging.sample_max_new_tokens=1.5
model.train=[vision, ears]
model.train=vision
model.train=[]
model.dtype=null
training.ema=1
training.ema=-0.1
training.ema=.nan
training.stall_minutes=0
training.stall_minutes=-1
training.stall_minutes=.inf
training.mixed_precision=null null
training.micro_batch_size=2.5
training.eval_every_steps=often
optimizer.beta1=-0.1
optimizer.eps=.nan
optimizer.weight_decay=.inf
schedule.warmup_fraction=-0.1
schedule.decay_fraction=2
schedule.min_factor=.nan
objective.teacher=''
objective.aux_loss_coef=0.1
sharding.sequence=0
sharding.accumulate=sometimes
sharding.experts=spread
sharding.offload_checkpoints=yes please
""".strip().splitlines()
"""Overrides of the quickstart; the error names the field."""

NAMED = {
    "data.train=s3://user:secret@bucket/a.jsonl": "data: holds credentials",
    "data.train=https://user:secret@host/a.jsonl": "data: holds credentials",
    "data.train={path: a.jsonl, split: test}": "a.jsonl",
    "trainig.max_steps=3": "trainig",
}
"""Where it names something else."""

OVERRIDES = {
    "training.max_steps": "expected key.sub=value",
    "training.max_steps 3": "expected key.sub=value",
    "--training.max_steps=3": "--training",
    "=3": "expected key.sub=value",
    "training.max_steps=[3": "not readable as YAML",
    "training.max_steps={": "not readable as YAML",
    "training.max_steps=3: 4: 5": "not readable as YAML",
    "training.max_steps=!!python/object:os.system x": "not readable as YAML",
    "training.max_steps=*a": "training.max_steps",
    "training.max_steps=\t3": "not readable as YAML",
    "training.max_steps.more=3": "max_steps is no section",
    "training.=3": "training.",
    ".max_steps=3": "unknown key",
    "..=3": "unknown key",
    "training..max_steps=3": "training.",
    "training=3": "training",
    "training=[]": "training",
    "training={}": "training.output_dir",
    "model={name_or_path: a, config: {model_type: llama}}": "model.name_or_path and model.config",
    "schedule={warmup_steps: 3, warmup_fraction: 0.1}": "schedule.warmup_steps and schedule.warmup_fraction",
    "TRAINING.MAX_STEPS=3": "TRAINING",
    "trainer.max_steps=3": "trainer",
    "training.max_steps=\x00": "not readable as YAML",
    "training.max_steps=３ﾐ": "training.max_steps",
}
"""What stands for an override -> what the error names."""

FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "found nothing"),
    "a comment": ("# nothing\n", "found nothing"),
    "a list": ("- model\n- data\n", "found list"),
    "a text": ("model", "found str"),
    "a number": ("3", "found int"),
    "JSON that is cut": ('{"model": {', "not readable as YAML"),
    "a tab": ("model:\n\tname_or_path: a\n", "not readable as YAML"),
    "a key twice": ("model:\n  name_or_path: a\n  name_or_path: b\n", "appears twice"),
    "a section twice": ("model: {}\ndata: {}\nmodel: {}\n", "appears twice"),
    "a mapping as a key": ("? {a: 1}\n: 2\n", "not readable as YAML"),
    "numbers as keys": ("1: 2\n", "1"),
    "null as a key": ("null: 2\n", "None"),
    "no text": (b"\xff\xfe\x00m\x00", "not readable as YAML"),
    "bytes of another encoding": ("description: caf\xe9\n".encode("latin-1"), "not readable as YAML"),
    "two documents": ("model: {}\n---\ndata: {}\n", "not readable as YAML"),
    "an anchor that is not there": ("model: *other\n", "not readable as YAML"),
    "an alias that holds itself": ("model: &a\n  config: *a\n", "not readable as YAML"),
    "Python in it": ("model: !!python/name:os.system\n", "not readable as YAML"),
    "an unknown tag": ("model: !secret x\n", "not readable as YAML"),
    "sections that are null": ("model:\ndata:\noptimizer:\ntraining:\n", "model"),
    "sections missing": ("description: x\n", "training: missing"),
    "a list of sections": ("model: [1]\ndata: [2]\n", "optimizer"),
    "nested too deep": ("model: " + "[" * 2000, "not readable as YAML"),
    "the notebook": ('{"cells": [], "metadata": {}, "nbformat": 4}', "cells"),
    "of another toolkit": ("base_model: a\ndatasets: []\nlearning_rate: 1e-4\n", "base_model"),
}
"""What a recipe's file holds -> what the error names."""


@pytest.mark.parametrize("override", REFUSED)
def test_refused(override: str) -> None:
    outcome = toolkit("validate", "quickstart", override)
    assert outcome.problems(NAMED.get(override, key_of(override))) == [], outcome.told


@pytest.mark.parametrize("override", OVERRIDES)
def test_no_override(override: str) -> None:
    outcome = toolkit("validate", "quickstart", "training.seed=1", "--", override)
    assert outcome.problems(OVERRIDES[override]) == [], outcome.told


@pytest.mark.parametrize("name", FILES)
def test_no_recipe(name: str, tmp_path: Path) -> None:
    content, named = FILES[name]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    outcome = toolkit("validate", str(path))
    assert outcome.problems(named) == [], outcome.told
