"""Writes docs/row_to_loss.md with the tensors that the code makes of two rows.

python docs/row_to_loss.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from string import Template
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit.data.build import build
from toolkit.data.images.images import PREFIX
from toolkit.data.samples.image_samples import COUNTS, KINDS_OF_TOKENS
from toolkit.data.tokens.tokenizer import load
from toolkit.model.attention.image_inputs import AXES
from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe.recipe import Recipe

FILE = Path(__file__).with_suffix(".md")
TOKENIZER = str(FILE.parents[1] / "recipes/data/shapes_tokenizer")
ROWS = (("What is red?", "a square"), ("How many circles are there?", "three"))
"""The question and the answer of each row."""
MAX_LENGTH = 40
SHOWN = ("input_ids", "labels", "position_ids", "lengths")

PAGE = Template("""# How a row becomes a loss

This page follows two rows of a file to the number that a run minimises. Its tensors are those that the code makes:
`python docs/row_to_loss.py` writes the page, and a test runs it and computes the loss by hand. The tokenizer is the
small one of the recipe `vision`, the model is a Llama with one layer and random weights. [The glossary](glossary.md)
has the words.

## 1. Columns

A file of rows, here two conversations. `data.train` names it.

```json
$columns
```

The objective names the kind of row, here `text`, and `toolkit/data/kinds` has a file for it. Its layout is recognised
by the columns, here `messages`. The report counts columns that no layout reads.

## 2. Example

The layout reads each row into an example, which no longer depends on the file: a conversation, a text, a pair, a
judged completion, a text with a class, words with tags, or a source and its target. A row that cannot be read becomes
a problem with its reason, is dropped by name, and is counted.

## 3. Tokens and targets

The encoder renders the example by the model's chat template and tokenises the whole text once. A token is a target if
it lies in an answer (`data.targets: assistant`), or ends one. Targets are **bold**:

$documents

The header of the answer is no target: it ends the prompt that a server gives. `<|im_end|>` is one, so that the model
learns to stop.
These two columns, `input_ids` and `targets`, are a document. Documents are made once, and cached by the content of
the rows, the tokenizer and the template. `toolkit data` shows them.

## 4. Packed sample

A sample has `data.max_length` tokens, here $max_length. The packer puts documents into samples by best fit: these two
take $used tokens of one sample. With `data.packing=false` each document is a sample.

## 5. Micro-batch

`training.micro_batch_size` samples are a micro-batch. Here it is one sample (B = $samples, T = $max_length):

$batch

- `labels` are aligned with `input_ids`; -100 marks what is not learned. The shift by one comes later.
- `position_ids` restart with each document. By that alone attention keeps documents apart, without a mask. Padding
  continues the last document and has no targets.
- `lengths` count the tokens without padding, for throughput.

Other rows bring other keys:

| key | shape | rows |
|---|---|---|
| `sources` | B, T | sources with a `name`: the number of a token's source |
| `segments` | B, T | pairs, judged and sampled completions: the completion that a token is of |
| `advantages` | R | sampled completions: how much better each is than the mean of its group |
| `drawn` | B, T | sampled completions: the log-probability with which a learned token was drawn |
| `reference` | R, 2 | pairs: log-probabilities by the reference |
| `good` | R | judged completions (KTO): whether the answer is good |
| `kl_...` | | judged completions: the same keys for mismatched completions |
| `margin` | R | pairs of a reward model |
| `attention_mask`, `token_type_ids` | B, T | texts with a class, words with tags, sources of an encoder-decoder |
| `target_lengths` | B | sources and targets |
| `$kinds` | B, T | rows with images: the kind of each token |
| `$counts`, `$prefix...` | | rows with images: images of each document, the processor's tensors |
| `whole_positions`, `whole_ids` | B, T | rows that ranks share (`sharding.sequence`): of the whole rows |
| `targets`, `owners`, `part` | B, T / n | the same: targets shifted before the cut, documents, the part's number |

## 6. What the host adds

Before a micro-batch goes to the device, `Objective.on_host` adds what the loss would otherwise have to fetch from
there, which would make the host wait:

| key | shape | in this batch | for what, and what it holds |
|---|---|---|---|
| `counted` | n | `$counted` | next-token, seq2seq: positions that predict a target |
| `shared` | bool | `$shared` | next-token: whether documents share rows |
| `bounds` | D + 1 | `$bounds` | flash attention, state spaces: where each document begins |
| `longest` | int | `$longest` | the same: tokens of the longest document |
| `ends`, `here` | D | | rewards, shared rows of classes: last token of each document |
| `learned` | R | | KTO: the completions that have a target |
| `$axes` | 4, B, T | | Qwen-VL with images: positions on three axes |

transformers would ask for `shared` in each layer. Only the logits of `counted` are computed.

## 7. Loss sum and count

Position t predicts the label at t + 1, so targets are the labels shifted left by one within each document. `counted`
are these positions. The forward stops at the head's inputs; logits are made for the counted positions alone, a chunk
at a time.

```
position  predicts      loss
$losses
```

The sum is $loss_sum over $num_targets targets. `Objective.training_sums` returns it, `count_targets` the count.

## 8. Mean

The loss of an optimizer step is the sum over all targets of all micro-batches on all ranks, divided by their number:
here $loss_sum / $num_targets = **$mean**. Each rank scales its micro-batches' sums by ranks x micro-batches /
targets, since FSDP2 averages gradients over ranks, and Accelerate over micro-batches. So the result does not depend
on how rows are packed, or on which rank has them: each row alone, unpadded, through transformers' model gives the
same $mean.

| code | what it does |
|---|---|
| `toolkit/data/build.py` | goes from sources to samples |
| `toolkit/data/kinds/text.py` | has what is special to these rows, from the columns to the list of a batch's keys |
| `toolkit/objectives/causal_lm.py` | has `on_host`, `inputs`, `loss_sum` and `count_targets` of this page |
| `toolkit/training/trainer.py` | sums micro-batches, scales, and exchanges the figures of the ranks |
""")


def columns() -> str:
    """The rows as lines of a file."""
    rows = (
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in ROWS
    )
    return "\n".join(map(json.dumps, rows))


def small_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocabulary, **sizes, **heads))


def made() -> dict[str, Any]:
    """What the code makes of the rows: tokenizer, samples, micro-batch, what the host adds, and the loss."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.jsonl").write_text(columns() + "\n", encoding="utf-8")
        data = {"train": f"{folder}/rows.jsonl", "max_length": MAX_LENGTH, "cache_dir": folder}
        rest = {"optimizer": {"learning_rate": 1e-3}, "training": {"output_dir": folder, "max_steps": 1}}
        recipe = Recipe.model_validate({"model": {"name_or_path": TOKENIZER}, "data": data, **rest})
        tokenizer = load(recipe.model, recipe.data)
        samples: Any = build(recipe.data, tokenizer, seed=0).train
        batch, documents = samples.batch([0]), [(ids.tolist(), targets.tolist()) for ids, targets in samples.tokens(0)]
    model = small_model(len(tokenizer))
    objective = CausalLM(model)
    known = objective.on_host(batch)
    targets = objective.targets(batch)
    loss_sum = objective.training_sums(model, known)[0].item()
    losses = objective.losses_of_tokens(model, known).tolist()
    model.config._attn_implementation = "flash_attention_2"  # asked alone, not run: there is no GPU
    bounds = CausalLM(model).on_host(batch)
    return locals()


def page() -> str:
    of = made()
    tokenizer, batch, known = of["tokenizer"], of["batch"], of["known"]
    tensors = "\n".join(f"{name:<13} {tuple(batch[name].shape)!s:<8} {_line(batch[name])}" for name in SHOWN)
    losses = (
        f"{at:>8}  {tokenizer.convert_ids_to_tokens(int(of['targets'][at])):<12} {of['losses'][at]:>5.3f}"
        for at in known["counted"].tolist()
    )
    values = {
        "columns": columns(),
        "kinds": KINDS_OF_TOKENS,
        "counts": COUNTS,
        "prefix": PREFIX,
        "axes": AXES,
        "documents": "\n".join(f"{n}. {_document(tokenizer, *both)}" for n, both in enumerate(of["documents"], 1)),
        "batch": f"```\n{tensors}\n```",
        "counted": known["counted"].tolist(),
        "shared": known["shared"],
        "bounds": of["bounds"]["bounds"].tolist(),
        "longest": of["bounds"]["longest"],
        "losses": "\n".join(losses),
        "loss_sum": f"{of['loss_sum']:.3f}",
        "num_targets": len(known["counted"]),
        "mean": f"{of['loss_sum'] / len(known['counted']):.3f}",
        "max_length": MAX_LENGTH,
        "used": int(batch["lengths"][0]),
        "samples": len(batch["input_ids"]),
    }
    return PAGE.substitute(values)


def _line(tensor: torch.Tensor) -> str:
    return " ".join(map(str, tensor.flatten().tolist()))


def _document(tokenizer: Any, ids: list[int], targets: list[bool]) -> str:
    tokens = tokenizer.convert_ids_to_tokens(ids)
    shown = (f"**`{token}`**" if target else f"`{token}`" for token, target in zip(tokens, targets, strict=True))
    return " ".join(shown)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
