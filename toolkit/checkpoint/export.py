"""A folder that `from_pretrained` loads: safetensors, configuration, tokenizer.

Weights are written as they stream from the ranks: rank 0 holds one file's tensors at a time, the
others their shards.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from toolkit import ranks
from toolkit.data.pictures import limits_of
from toolkit.data.tokenizer import pad_id
from toolkit.errors import ExportError, counted, first_line
from toolkit.model.adapters import (
    base_fingerprint,
    base_name,
    base_of,
    has_adapter,
    merged,
    state_in_layers,
    trained_names,
    write_adapter,
)
from toolkit.model.file_names import FileNames
from toolkit.model.load import CARRIED, PROCESSORS, auto_class, load_stored
from toolkit.model.quantised import dequantised, quantise_loaded
from toolkit.model.values import some
from toolkit.model.weights import fit_of, names_in_files
from toolkit.paths import BASE_FILE, GIB
from toolkit.sharding.shards import shard_group, shard_shape, sharded_dim, state_once

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits after reloading, as a share of the largest logit, by exported type."""


@dataclass(frozen=True)
class ExportSettings:
    """How the folder is written.

    Attributes:
        dtype: of the weights; buffers keep theirs.
        max_shard_bytes: largest safetensors file, unless one tensor is larger.
        merge: adapters are added to the weights; otherwise they are all that is written.
        average: of a checkpoint, the averages (`training.ema`) in place of the weights, if it has them.
    """

    dtype: torch.dtype
    max_shard_bytes: int
    merge: bool = False
    average: bool = True


def export(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    settings: ExportSettings,
) -> None:
    """Writes `folder`, whole or not at all. Every rank calls this.

    Raises:
        ToolkitError: on every rank, where the disk does not take it.
    """
    inner = accelerator.unwrap_model(model)
    unfinished = _unfinished(folder)
    problems: list[Exception] = []

    def finish() -> None:
        if problems:
            raise problems[0]
        if is_whole(inner, settings):
            write_configuration(base_of(inner), tokenizer, unfinished, settings.dtype)
            carry_over(fit_of(inner).folder, unfinished)
        else:
            tokenizer.save_pretrained(unfinished)
            carry_over(fit_of(inner).folder, unfinished, [PROCESSORS])
        limits_of(tokenizer).write(unfinished)
        let_others_read(unfinished)
        if folder.exists():  # of the same run, cut off after its export or taken further
            shutil.rmtree(folder)
        os.replace(unfinished, folder)

    ranks.on_first_rank(lambda: unfinished.mkdir(parents=True, exist_ok=True))
    try:
        _write_model(inner, unfinished, settings)
    except (OSError, SafetensorError) as error:  # on rank 0, and all of its collectives are done
        problems.append(error)
    try:
        ranks.on_first_rank(lambda: _told(finish, unfinished))
    finally:
        if ranks.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


def _told(finish: Callable[[], None], place: Path) -> None:
    try:
        finish()
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"the export could not be written to {str(place.parent)!r}: {first_line(error)}; make room, and start the "
            "same command again: it goes on from the last checkpoint, if there is one"
        ) from error


def require_room(model: nn.Module, folder: Path, settings: ExportSettings) -> None:
    """Raises OSError (ENOSPC) where the disk has less room than the export needs; clears away what one had begun."""
    shutil.rmtree(_unfinished(folder), ignore_errors=True)
    needed, free = _num_bytes(model, settings), shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"it needs {needed:,} bytes in {str(folder.parent)!r}, where {free:,} are free")


def _num_bytes(model: nn.Module, settings: ExportSettings) -> int:
    """Of the weights that an export writes, about; a quantised base that is merged takes more."""
    kept = [p for p in model.parameters() if is_whole(model, settings) or p.requires_grad]
    return sum(parameter.numel() for parameter in kept) * settings.dtype.itemsize


def let_others_read(folder: Path) -> None:
    """Gives the files of a folder that has just been made the mode that the umask decides."""
    # safetensors makes its files readable by their owner alone. The umask shows in the folder: to read it, one
    # would have to set it, for all threads.
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        path.chmod(mode)


def is_whole(model: nn.Module, settings: ExportSettings) -> bool:
    """Whether the export is a model, and not an adapter alone."""
    return settings.merge or not has_adapter(model)


def _write_model(model: nn.Module, folder: Path, settings: ExportSettings) -> None:
    """Weights alone, as they stream from the ranks. Collective."""
    if not has_adapter(model):
        names = file_names(model)
        write_weights(
            whole_tensors(state_once(model)), {n for n, _ in model.named_parameters()}, folder, settings, names
        )
    elif settings.merge:
        parameters = {base_name(name) for name, _ in model.named_parameters()}
        tensors = dequantised(model, whole_tensors(state_in_layers(model)))
        write_weights(merged(model, tensors), parameters, folder, settings, file_names(model))
    else:
        trained = trained_names(model)
        state = {name: tensor for name, tensor in state_once(model).items() if name in trained}
        write_adapter(model, whole_tensors(state), folder, base_fingerprint(model))


def file_names(model: nn.Module) -> FileNames:
    """Those of the files that the model was loaded from."""
    return FileNames(base_of(model), fit_of(model).stored)


def carry_over(base: Path | None, folder: Path, patterns: Sequence[str] = CARRIED) -> None:
    """Copies what belongs to the base and holds of its export, too: how it reads pictures or sound, and its licence.

    Args:
        patterns: of the names of files.
    """
    for pattern in patterns if base is not None else ():
        for path in sorted(base.glob(pattern)):  # type: ignore[union-attr]
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def names_fact(folder: Path, stored: Set[str] | None) -> str | None:
    """Says which tensors of the base an export lacks, and which it has beside them; None if there are none.

    Args:
        stored: names in the base's files; None: it had none.
    """
    found = names_in_files(folder)
    if stored is None or found == stored:
        return None
    lost, added = sorted(stored - found), sorted(found - stored)
    told = [f"lacks {counted(len(lost), 'tensor')} of the base: {some(lost)}"] if lost else []
    return " and ".join(told + ([f"has {counted(len(added), 'new tensor')}: {some(added)}"] if added else []))


def whole_tensors(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor, whole on rank 0 and None elsewhere. Collective."""
    for name, tensor in state.items():
        yield name, gather_on_rank_zero(tensor)


def gather_on_rank_zero(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole of a tensor on rank 0; None on the other ranks. Collective for DTensors."""
    if not isinstance(tensor, DTensor):
        return tensor if ranks.rank() == 0 else None
    group = shard_group(tensor)
    size, dim = dist.get_world_size(group), sharded_dim(tensor)
    # With offload the shards are on the host, and NCCL gathers on the device.
    local = tensor.to_local().to(tensor.device_mesh.device_type)
    # The last shards can have fewer rows, and gather wants equal shapes.
    padded = local.new_zeros(shard_shape(tensor))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    # With replicas every shard group gathers; only the one of rank 0 is kept below.
    first = dist.get_rank(group) == 0
    parts = [torch.empty_like(padded) for _ in range(size)] if first else None
    dist.gather(padded, parts, group=group, group_dst=0)
    if not first and padded.device.type != "cpu":
        # NCCL returns at once, and counts ten minutes from then: no more than one waits while rank 0 writes a file.
        torch.get_device_module(padded.device).current_stream().synchronize()
    if ranks.rank() != 0:
        return None
    assert parts is not None
    return torch.cat(parts, dim).narrow(dim, 0, tensor.shape[dim])


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    trained: Set[str],
    folder: Path,
    settings: ExportSettings,
    names: FileNames,
) -> None:
    """Writes tensors as they come; on rank 0, where alone they are.

    Args:
        trained: names of parameters, which are converted to the settings' type; buffers keep theirs.
        names: under which they are written.
    """
    tensors = iter(tensors)
    try:
        _write_files(names.in_files(_converted(tensors, trained, settings.dtype)), folder, settings)
    except (OSError, SafetensorError):
        for _ in tensors:  # the other ranks still send theirs
            pass
        raise


def _converted(
    tensors: Iterable[tuple[str, torch.Tensor | None]], trained: Set[str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """What rank 0 has, on the host, parameters in this type; on other ranks nothing."""
    for name, whole in tensors:
        if whole is not None:
            yield name, whole.to(device="cpu", dtype=dtype if name in trained else whole.dtype)


def _write_files(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, settings: ExportSettings) -> None:
    files: list[list[str]] = []
    group: dict[str, torch.Tensor] = {}
    group_bytes = total_bytes = 0
    for name, whole in tensors:
        tensor = whole.contiguous()
        size = tensor.numel() * tensor.element_size()
        if group and group_bytes + size > settings.max_shard_bytes:
            files.append(_write_file(folder, len(files), group))
            group, group_bytes = {}, 0
        group[name] = tensor
        group_bytes += size
        total_bytes += size
    if ranks.rank() == 0:
        files.append(_write_file(folder, len(files), group))
        _name_files(folder, files, total_bytes)


def _write_file(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    # The final name holds the number of files, which is known at the end only.
    save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(tensors)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """The names that transformers looks for, which hold the number of files."""
    if len(files) == 1:
        os.replace(folder / "part-0.safetensors", folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"part-{number}.safetensors", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_configuration(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """What belongs to the weights: configuration, generation settings, tokenizer."""
    # The configuration belongs to the live model, which is still verified in its own type.
    dtype_before = model.config.dtype
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    model.config.dtype = dtype_before
    if model.can_generate():
        # Not by `save_pretrained`, which refuses what many a base has, as a temperature without sampling.
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
    tokenizer.save_pretrained(folder)


def reload(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    base: PretrainedConfig | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The exported model in evaluation mode; on `device` if it is sure to have room, else on the host.

    Args:
        base: configuration of the model that an exported adapter belongs to.
        trust_remote_code: whether the model's own Python code is run, as the recipe says.
    """
    # Never left to transformers, which would ask on the terminal.
    trust = {"trust_remote_code": trust_remote_code}
    plain = {**trust, "use_safetensors": True}
    if device.type == "cuda":
        needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        free, _ = torch.cuda.mem_get_info(device)
        device = device if needed + 4 * GIB < free else torch.device("cpu")
    if (folder / "adapter_config.json").is_file():
        from peft import PeftConfig, PeftModel

        adapter = PeftConfig.from_pretrained(str(folder))
        name, revision = adapter.base_model_name_or_path, adapter.revision
        stored = PretrainedConfig.get_config_dict(name, revision=revision)[0].get("quantization_config")
        if stored is not None:
            model = load_stored(name, revision, base, stored, dtype)
        else:
            model = auto_class(base).from_pretrained(name, config=base, revision=revision, dtype=dtype, **plain)
        quantise_loaded(model, json.loads((folder / BASE_FILE).read_text(encoding="utf-8"))["quantization"])
        return PeftModel.from_pretrained(model, str(folder)).to(device).eval()
    auto = auto_class(AutoConfig.from_pretrained(folder, **trust))
    return auto.from_pretrained(folder, dtype=dtype, **plain).to(device).eval()


@torch.no_grad()
def verify(
    accelerator: Accelerator,
    model: nn.Module,
    reloaded: PreTrainedModel | None,
    logits_of: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    batch: dict[str, torch.Tensor],
) -> float:
    """Compares the trained model's logits with those of the export on one batch. Every rank calls this.

    Args:
        reloaded: on rank 0, None elsewhere.
        logits_of: the objective's.
        batch: of the objective.

    Returns:
        The largest difference, as a share of the largest logit; 0 on ranks other than 0.

    Raises:
        ExportError: on every rank, if it is more than `TOLERANCE`.
    """
    model.eval()
    logits = logits_of(model, send_to_device(batch, accelerator.device)).float()
    difference = tolerance = 0.0
    if reloaded is not None:
        with ranks.all_cores():
            again = logits_of(reloaded, send_to_device(batch, reloaded.device))
        difference = relative_difference(again.float().to(logits.device), logits)
        tolerance = TOLERANCE[reloaded.dtype]
    results = ranks.gather_objects((difference, tolerance))
    require_close(*results[0])
    return results[0][0]


def require_close(difference: float, tolerance: float) -> None:
    """Raises ExportError if the logits of an export differ by more than the tolerance."""
    # Written this way round, NaN is refused, too.
    if not difference <= tolerance:
        raise ExportError(
            f"the exported folder gives other logits than the trained model: they differ by {difference:.1e} of the "
            f"largest, more than {tolerance:.0e}; the folder is not to be trusted"
        )


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element of `b`."""
    # Logits that are all zero would divide by zero.
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


@torch.no_grad()
def sample_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int, seed: int
) -> str:
    """What follows `prompt`, or a target for it, drawn at temperature 0.8 from the 95 % most likely tokens."""
    # `generate` refuses arguments that the model does not take, as token types of a causal model.
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    # Of the model's own settings its end tokens alone: beams or penalties of its makers would make another draw.
    plain = GenerationConfig.from_model_config(model.config)
    plain.eos_token_id = model.generation_config.eos_token_id
    model.generation_config = plain
    # Forked: the sample must not move the run's own generators.
    with (
        ranks.all_cores(),
        torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []),
    ):
        torch.manual_seed(seed)
        tokens = model.generate(
            **encoded,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.8,
            top_p=0.95,
            pad_token_id=pad_id(tokenizer),
        )
    begins = 1 if model.config.is_encoder_decoder else encoded["input_ids"].shape[1]
    return tokenizer.decode(tokens[0, begins:], skip_special_tokens=True)  # type: ignore[no-any-return]
