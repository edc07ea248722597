"""transformers#37186: under Accelerate's FSDP2 no step ends if one rank has no image in its micro-batch.

The rank with an image gathers the weights of the blocks that see, the other those of the language model. NCCL waits, as
the thread tells; gloo finds that the sizes differ, and ends the process. Counted are the steps of two that are trained.
Accelerate has FSDP on GPUs alone; here its own code runs on CPU ranks, told that they are for FSDP.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import torch
import yaml
from _common import on_ranks, run_recipe, show
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from image_tokens import OURS, PROCESSOR, RECIPES, theirs
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration

STEPS = 2
ROWS = [
    row if number % 2 == 0 else {"messages": [{"role": "user", "content": "how many ?"}, row["messages"][1]]}
    for number, row in enumerate(OURS[: 2 * STEPS])
]
"""Those of the second rank have no image."""

BLOCKS = ["LlamaDecoderLayer", "CLIPEncoderLayer"]


def peer(model: str, ended: Path) -> None:
    """Writes a letter into `ended` for each step that the first rank has trained."""
    accelerator = Accelerator(cpu=True)
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=BLOCKS
    )
    AcceleratorState().distributed_type = PartialState().distributed_type = DistributedType.FSDP
    loaded = LlavaForConditionalGeneration.from_pretrained(model).train()
    loaded, optimizer = accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters()))
    processor = AutoProcessor.from_pretrained(model)
    for step in range(STEPS):
        row = {"images": [], **ROWS[2 * step + accelerator.process_index]}
        images = theirs()[2 * step]["images"] if row["images"] else None
        words = processor.apply_chat_template(row["messages"], tokenize=False)
        batch = processor(images=images, text=words, return_tensors="pt")
        accelerator.backward(loaded(**batch, labels=batch["input_ids"]).loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with ended.open("a") as file:
                file.write("x")


def main() -> None:
    torch.manual_seed(0)
    config = yaml.safe_load((RECIPES / "vision.yaml").read_text())["model"]["config"]
    config["text_config"]["vocab_size"] = len(AutoProcessor.from_pretrained(PROCESSOR).tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        saved, ended = f"{folder}/model", Path(folder, "ended")
        LlavaForConditionalGeneration(LlavaConfig(**config)).save_pretrained(saved)
        AutoProcessor.from_pretrained(PROCESSOR).save_pretrained(saved)
        recipe = {"model": {"name_or_path": saved, "train": ["language", "projector", "vision"]}}
        recipe["data"] = {"train": ROWS, "max_length": 256, "packing": False}
        recipe["sharding"] = {"strategy": "zero3"}
        recipe["training"] = {"max_steps": STEPS}
        recipe["logging"] = {"every_steps": 1}
        records = run_recipe(recipe, folder)
        ended.touch()
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            on_ranks(peer, saved, ended)
        show("steps trained", peer=len(ended.read_text()), right=STEPS, ours=records[-1]["step"])


if __name__ == "__main__":
    main()
