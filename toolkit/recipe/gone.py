"""Names of earlier versions: keys of recipes, commands and options that are gone, and what to do instead."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gone(NamedTuple):
    """What to do instead of a name, in words that end a sentence.

    `idle` has the values of a key that asked for nothing, as each run wrote them into its recipe.
    """

    instead: str
    since: str = "0.3.0"
    idle: tuple[Any, ...] = (None,)


GONE_KEYS = {
    "sharding.accumulate=auto": Gone("write by_block where `toolkit plan` says that it fits and sends less"),
    "sharding.device_state_gib=auto": Gone("give the GiB that may stay on each device"),
    "answers.every_evaluations": Gone("leave it out: answers come at each evaluation", idle=(1,)),
    "answers.extract": Gone("write answers.compare: text=REGEX, or numeric=REGEX"),
    "answers.numeric": Gone("write answers.compare: numeric", idle=(False,)),
    "answers.score": Gone("write answers.compare: file.py:function"),
    "answers.strict": Gone("write answers.compare: strict", idle=(False,)),
    "answers.structured": Gone("write answers.compare: structured", idle=(False,)),
    "objective.rewards.extract": Gone("write compare: text=REGEX, or numeric=REGEX", idle=()),
    "objective.rewards.score": Gone("write compare: file.py:function", idle=()),
    "checkpoint.keep_every": Gone("set keep_last: null to keep all, and delete what you do not need"),
    "logging.sample_max_new_tokens": Gone("set logging.held_out_samples", idle=(80,)),
    "logging.sample_prompt": Gone(
        "set logging.held_out_samples, which shows what the model writes after held-out prompts over the run"
    ),
    "objective.router_bias_rate": Gone("leave it out: objective.router_aux_coef balances experts", idle=(None, 0)),
    "objective.router_z_coef": Gone("leave it out: objective.router_aux_coef balances experts", idle=(None, 0)),
    "objective.teacher_revision": Gone(
        "name the folder that `hf download TEACHER --revision REVISION` prints in objective.teacher", "0.4.0"
    ),
    "optimizer.projector_learning_rate": Gone("write learning_rates: {'*multi_modal_projector*': RATE}"),
    "optimizer.router_learning_rate": Gone("write learning_rates: {'*router*': RATE}, with the routers' name"),
    "optimizer.router_weight_decay": Gone("leave it out: matrices decay by weight_decay"),
    "optimizer.vision_learning_rate": Gone("write learning_rates: {'*vision_tower*': RATE}"),
    "sharding.chunk_tokens": Gone(
        "leave it out: sharding.sequence shares each row among ranks, and offload_checkpoints keeps inputs on the host"
    ),
    "sharding.prefetch": Gone("leave it out: FSDP2 gathers one block ahead by itself"),
    "sharding.offload_threads": Gone("leave it out: the host's update takes all but two of a rank's cores", "0.2.0"),
}
"""Key, or `key=value` for a value that is gone. Keys of the items of a list stand without a number."""

GONE_COMMANDS = {
    "compare": Gone("look at runs side by side in a tracker (logging.trackers; `toolkit help trackers` shows two)"),
    "configs": Gone("write toolkit recipes configs, and toolkit recipes copy", "0.4.0"),
    "reproduce": Gone("train the export's recipe.yaml; `toolkit help reliability` says how to compare the weights"),
    "schema": Gone("write toolkit recipes schema"),
}

_NO_SECONDS = "leave it out: a plan has bytes and no seconds"

GONE_OPTIONS = {
    **{f"{command} --output": Gone("write --to") for command in ("data", "generate", "init", "job")},
    **{
        f"{command} --recipe": Gone("name the recipe first, without --recipe")
        for command in ("data", "job", "plan", "train", "validate", "verify")
    },
    **{
        f"{command} --{name}": Gone(f"write --compare {instead}")
        for command in ("generate", "sample")
        for name, instead in (
            ("extract", "text=REGEX, or numeric=REGEX"),
            ("numeric", "numeric"),
            ("score", "file.py:function"),
            ("strict", "strict"),
            ("structured", "structured"),
        )
    },
    "doctor --hub": Gone("leave it out: each command that needs the hub says at its start whether it answers"),
    "generate --cpu": Gone("leave it out, or set --device cpu"),
    "generate --gpus": Gone("leave it out: --device auto spreads the model over all GPUs"),
    "job --on": Gone("leave it out for Slurm; `toolkit help multi_node` has files for Kubernetes and SkyPilot"),
    "job --volume": Gone("`toolkit help examples/kubernetes.yaml` mounts one"),
    "init --from": Gone("`toolkit help index` names the pages that say what another tool's keys are called here"),
    "plan --calibrate": Gone(_NO_SECONDS),
    "plan --dram-gbs": Gone(_NO_SECONDS),
    "plan --link-gbs": Gone(_NO_SECONDS),
    "plan --longest-row": Gone("plan several values of data.max_length"),
    "plan --nic-gbs": Gone(_NO_SECONDS),
    "plan --pcie-gbs": Gone(_NO_SECONDS),
    "plan --plot": Gone("--json has the bytes of each row"),
    "train --retries": Gone("run the same command again, or torchrun --max-restarts (`toolkit help reliability`)"),
    "verify --layers": Gone("set model.name_or_path to a smaller model of the family"),
    "plan --trace": Gone("leave it out: tests compare plans with traces of FSDP2"),
}
"""`command --option`."""


def gone_sentence(kind: dict[str, Gone], name: str) -> str | None:
    """Returns since when a name is gone and what to do instead; None for a name that has never been."""
    row = kind.get(name)
    return None if row is None else f"gone since {row.since}; {row.instead}"


def drop_idle(values: dict[str, Any]) -> None:
    """Removes keys that are gone and ask for nothing, so that the recipe of an earlier run still starts it."""
    for name, row in GONE_KEYS.items():
        *parents, key = name.split(".")
        node: Any = values
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and key in node and node[key] in row.idle:
            del node[key]
