"""Makes an export stop at the tokens that training teaches as an end."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.samples.samples import Samples
from toolkit.data.samples.turn_ends import learned_ends


def teach_to_stop(model: Any, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> str | None:
    """Adds the ends that are learned to the model's `generation_config.eos_token_id`, which its export takes.

    A chat model's configuration often has only the end token of its base (Gemma's lacks `<end_of_turn>`), so that
    servers generate past the end of the answer.

    Returns:
        A description of what ends an answer, and what was added; None for models that do not continue a text.
    """
    if not samples.continues_text or not model.can_generate():
        return None
    learned = learned_ends(samples, tokenizer)
    if not learned:
        return "no special token is learned as an end; generation stops where the model's settings say"
    settings = model.generation_config
    configured = settings.eos_token_id
    before = configured if isinstance(configured, list) else [] if configured is None else [configured]
    told = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in sorted(learned))
    missing = sorted(learned - set(before))
    if not missing:
        return f"{told} is learned as an end, and generation_config.eos_token_id has it"
    settings.eos_token_id = [*before, *missing] if before else missing[0] if len(missing) == 1 else missing
    return f"{told} is learned as an end; generation_config.eos_token_id of the export is {settings.eos_token_id}, " + (
        f"and not {configured} as before"
    )
