"""Wrong fields, values and overrides of a recipe: `toolkit validate` refuses each with one clear error.

A field has one value outside each of its bounds and one for each error of ours. What pydantic makes of wrong types is
not tested for each field.
"""

from __future__ import annotations

from pathlib import Path

from support.refusals import Outcome, toolkit, unclear

REFUSED = """
adapter.kind: qlora
adapter.r: 8
adapter.alpha: -1
adapter.dropout: 1
adapter.double_quantization: true
adapter.modules_to_save: [lm_head]
adapter.start_from: exports/a
adapter.target_modules: 3
answers.batch_size: 0
answers.compare: 'text=(' | '' | number
answers.file: '' | [a.jsonl]
answers.files: a.jsonl
answers.max_new_tokens: 0 | 3
answers.system: ''
checkpoint.every_minutes: 0 | .nan | .inf | half an hour
checkpoint.every_steps: 0 | 99999999999999999999999999999999999999999999999999999999999999999999
checkpoint.keep_best: yes please | true
checkpoint.keep_last: 0
checkpoint.resume: true | null
checkpoint.time_limit_minutes: 0 | .inf
checkpoint.to: memory://run | s3:// | s3://bucket/ | file://relative | http://host/run | s3://user:secret@b/c | '' | 3
data.cache_dir: 5 | "a\\0b"
data.cahce_dir: x
data.chat_template: true
data.columns: text
data.columns.margin: 0.5
data.columns.tags: {a: b}
data.columns.txt: body
data.image_root: ''
data.long_rows: cut
data.max_dropped_fraction: 2 | -1 | .nan
data.max_length: 0 | 1000000000 | 128.5 | long | null
data.max_pixels: -1
data.max_target_length: 1
data.max_validation_samples: 0
data.min_pixels: 0
data.num_proc: 0
data.packing: auto
data.shuffle: 42
data.source_prefix: ''
data.targets: user
data.template_arguments: text | {} | {1: 2}
data.template_date: today | 2026-11 | 20261126 | 2026-11-26T10:00:00 | 99999-01-01
data.train: null | [] | '' | 3 | {} | [[a.jsonl]] | {path: a.jsonl, wieght: 3} | {path: a.jsonl, weight: 2}
data.train: [{path: a.jsonl, weight: -1}, {path: b.jsonl, weight: 1}] | [{path: a.jsonl, weight: 1}, b.jsonl]
data.train: [{path: a.jsonl, weight: .nan}, {path: b.jsonl, weight: 1}] | [{path: a.jsonl, name: a b}] | [{path: ''}]
data.validation: [] | '' | {path: a.jsonl, weight: 1}
data.validation_fraction: 0 | 1
export.dtype: int8
export.hub_private: false
export.max_shard_gib: 0 | 5GB | .inf | 1e300
export.merge: true
export.push_to_hub: name | a/b/c
logging.every_steps: 0 | 9999999999999999999
logging.held_out_samples: -1
logging.project_name: "\\0"
logging.trackers: wandb | [weights]
max_steps: 3
model: llama
model.add_tokens: <a> | []
model.allow_new_weights: lm_head | []
model.attention: flash
model.config: 3 | {} | [llama]
model.config.model_type: null | 3
model.dtype: fp8
model.name_or_path: '' | 3 | "a\\0b"
model.nmae_or_path: x
model.revision: main
model.tokenizer: ''
model.train: [vision, ears] | vision | []
model.train_tokenizer_vocab_size: 10
model.trust_remote_code: maybe
objective.aux_loss_coef: 0.1
objective.beta: 0.1
objective.class_weights: balanced
objective.kind: dpo
objective.labels: [a, b]
objective.loss: dpo
objective.teacher: ''
optimizer.beta1: 1 | -0.1
optimizer.beta2: 1.5
optimizer.eps: 0 | .nan
optimizer.kind: sgd
optimizer.learning_rate: 0 | .nan | .inf | high | '1e-4'
optimizer.momentum: 0.9
optimizer.weight_decay: -0.1 | .inf
schedule.decay_fraction: 0.1
schedule.kind: step
schedule.min_factor: 2 | -0.1 | .nan
schedule.warmup_fraction: 1.5 | -0.1
schedule.warmup_steps: -1
sharding.accumulate: sometimes
sharding.activation_checkpointing: 0 | true | all
sharding.chunk_tokens: 0 | 4096
sharding.device_state_gib: -1
sharding.experts: spread
sharding.offload: cpu
sharding.offload_checkpoints: true
sharding.offload_executor: gpu
sharding.prefetch: 0
sharding.sequence: 0
sharding.strategy: zero4 | zero3+offload
sharding.unit_classes: LlamaDecoderLayer
training.best_by: my_figure
training.compile: max-autotune
training.ema: 1 | -0.1
training.epochs: 3
training.eval_every_steps: 0
training.gradient_accumulation_steps: 0 | 999999999999999999999999999999
training.max_grad_norm: 0
training.max_non_finite_steps: 0
training.max_steps: 0 | 1.5 | ten | 9007199254740993
training.micro_batch_size: 0 | auto
training.mixed_precision: fp8 | yes
training.num_epochs: 0 | .inf
training.output_dir: '' | [a] | "a\\0b"
training.patience: 0
training.profile_steps: 5 | [3] | [5, 3] | [1, 100]
training.seed: -1 | 4294967296
training.stall_minutes: 0 | .inf
""".strip().splitlines()
"""A field of the quickstart, and values of which each is refused; the error names the field."""

OVERRIDES = {
    "trainig.max_steps=3": "trainig",
    "data.train={path: a.jsonl, split: test}": "a.jsonl",
    "data.train=s3://user:secret@bucket/a.jsonl": "data: holds credentials",
    "data.train=https://user:secret@host/a.jsonl": "data: holds credentials",
    "training.max_steps": "expected key.sub=value",
    "--training.max_steps=3": "--training",
    "=3": "expected key.sub=value",
    "training.max_steps=[3": "not readable as YAML",
    "training.max_steps=!!python/object:os.system x": "not readable as YAML",
    "training.max_steps=\x00": "not readable as YAML",
    "training.seed.more=3": "seed is not a section",
    ".max_steps=3": "unknown key",
    "training..max_steps=3": "training.",
    "training=3": "training",
    "training={}": "training.output_dir",
    "model={name_or_path: a, config: {model_type: llama}}": "model.name_or_path is not possible with model.config",
    "schedule={warmup_steps: 3, warmup_fraction: 0.1}": "schedule.warmup_fraction",
    "TRAINING.MAX_STEPS=3": "TRAINING",
}
"""What stands for an override -> what the error names."""

FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "found nothing"),
    "a list": (b"- model\n- data\n", "found list"),
    "a number": (b"3", "found int"),
    "a tab": (b"model:\n\tname_or_path: a\n", "not readable as YAML"),
    "a key twice": (b"model:\n  name_or_path: a\n  name_or_path: b\n", "appears twice"),
    "a mapping as a key": (b"? {a: 1}\n: 2\n", "not readable as YAML"),
    "numbers as keys": (b"1: 2\n", "1"),
    "null as a key": (b"null: 2\n", "None"),
    "not UTF-8": (b"description: caf\xe9\n", "not readable as YAML"),
    "an alias that holds itself": (b"model: &a\n  config: *a\n", "not readable as YAML"),
    "Python in it": (b"model: !!python/name:os.system\n", "not readable as YAML"),
    "sections that are null": (b"model:\ndata:\noptimizer:\ntraining:\n", "model"),
    "sections missing": (b"description: x\n", "training: missing"),
    "nested too deep": (b"model: " + b"[" * 2000, "not readable as YAML"),
    "of another toolkit": (b"base_model: a\ndatasets: []\nlearning_rate: 1e-4\n", "base_model"),
}
"""What a recipe's file holds -> what the error names."""


def test_refused_values() -> None:
    fields = [line.partition(": ") for line in REFUSED]
    given = [(f"{field}={value}", field) for field, _, values in fields for value in values.split(" | ")]
    assert unclear((override, toolkit("validate", "quickstart", override), field) for override, field in given) == []


def test_refused_overrides() -> None:
    validate = ("validate", "quickstart", "training.seed=1", "--")
    assert unclear((override, toolkit(*validate, override), named) for override, named in OVERRIDES.items()) == []


def test_refused_files(tmp_path: Path) -> None:
    def outcome(content: bytes) -> Outcome:
        (tmp_path / "recipe.yaml").write_bytes(content)
        return toolkit("validate", str(tmp_path / "recipe.yaml"))

    assert unclear((name, outcome(content), named) for name, (content, named) in FILES.items()) == []
