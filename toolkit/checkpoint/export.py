"""Exports a model to a folder that `from_pretrained` loads: safetensors, configuration, tokenizer.

Weights are written as they stream from the ranks: rank 0 holds the tensors of one file at a time, the other ranks hold
only their shards.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.checkpoint.beside_weights.model_files import write_adapter_files, write_model_files
from toolkit.data.images.images import limits_of
from toolkit.errors import BadInputError, ExportError, counted, first_line, listed
from toolkit.model.adapters.adapters import (
    base_name,
    base_of,
    has_adapter,
    merged,
    state_in_layers,
    trained_names,
    write_adapter,
)
from toolkit.model.adapters.base_file import read_base
from toolkit.model.adapters.per_expert import write_per_expert
from toolkit.model.beside_weights.base_files import CONFIG, GENERATION, BaseFiles
from toolkit.model.load import auto_class, load_stored
from toolkit.model.quantised.quantised import dequantised, quantise_loaded
from toolkit.model.structure.tying import config_of_export
from toolkit.model.weights.file_names import FileNames
from toolkit.model.weights.weights import Fit, names_in_files
from toolkit.paths import GIB, digest_of_configuration, fingerprint_of
from toolkit.sharding.fsdp2.shards import shard_group, sharded_dim, state_once, tensor_dim, tensor_group, tensor_part

EXPORT_TYPES = ("float32", "bfloat16", "float16")

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest allowed difference of logits after reloading, as a share of the largest logit, by exported dtype."""


def dtype_of_export(asked: str | None, of_base: torch.dtype | str | None, is_adapter: bool) -> torch.dtype:
    """Returns the dtype of an export: the one asked for, else the base's, and for an adapter that of training, float32.

    Args:
        of_base: the base's; float32 stands for one that is not known, or that no export has.
    """
    name = asked or ("float32" if is_adapter else str(of_base).removeprefix("torch."))
    return getattr(torch, name if name in EXPORT_TYPES else "float32")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ExportSettings:
    """How the folder is written.

    Attributes:
        dtype: the dtype of the weights. Buffers keep theirs.
        max_shard_bytes: the size of the largest safetensors file, unless one tensor is larger.
        merge: whether to merge adapters into the weights. Otherwise only the adapters are written.
        average: whether to export a checkpoint's averages (`training.ema`) in place of the weights, if it has them.
    """

    dtype: torch.dtype
    max_shard_bytes: int
    merge: bool = False
    average: bool = True


@dataclass(frozen=True)
class ExportSource:
    """What is exported: a run's live model, a checkpoint, or an adapter with its base.

    Attributes:
        model: the whole model, or one with adapters of which only these are written. It may lack its weights.
        tokenizer: its tokenizer.
        files: the files next to the weights of the base.
        tensors: whole tensors of any shape by their names in the model, on rank 0; None on other ranks.
        parameters: the names of parameters, which are converted to the settings' dtype. Buffers keep theirs.
        names: the names of tensors in the files; None for an adapter.
        trained_on: of an adapter, the fingerprint of the base and the digests of its configuration and of its
            generation settings, as they were when training began.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    files: BaseFiles
    tensors: Iterable[tuple[str, torch.Tensor | None]]
    parameters: Set[str] = frozenset()
    names: FileNames | None = None
    trained_on: tuple[str | None, str | None, str | None] = (None, None, None)


def source_of_run(
    model: nn.Module, fit: Fit, tokenizer: PreTrainedTokenizerBase, settings: ExportSettings
) -> ExportSource:
    """Returns the source of a live model's export. Its tensors are gathered, all ranks together, as they are taken."""
    if not is_whole(model, settings):
        trained = trained_names(model)
        state = {name: tensor for name, tensor in state_once(model).items() if name in trained}
        # As it was read: the base may have been edited since.
        configuration = digest_of_configuration(fit.files.contents.get(CONFIG, b""))
        trained_on = fit.fingerprint, configuration, fit.files.digests().get(GENERATION)
        return ExportSource(model, tokenizer, fit.files, whole_tensors(state), trained_on=trained_on)
    names = FileNames(base_of(model), fit.stored, None if fit.stored is None else fit.folder)
    parameters = {base_name(name) for name, _ in model.named_parameters()}
    if has_adapter(model):
        tensors = merged(model, dequantised(model, whole_tensors(state_in_layers(model))))
        return ExportSource(base_of(model), tokenizer, fit.files, tensors, parameters, names)
    return ExportSource(model, tokenizer, fit.files, whole_tensors(state_once(model)), parameters, names)


def write_export(
    source: ExportSource,
    to: Path,
    settings: ExportSettings,
    then: str,
    check: Callable[[Path], Any] = lambda folder: None,
    replaces: bool = False,
) -> Any:
    """Writes the folder `to`, whole or not at all. The one writer of exports. Collective.

    Args:
        source: what is written.
        to: the folder.
        settings: how it is written.
        then: what to do once there is room, for errors.
        check: looks at the folder on rank 0 before it has its name; what it raises leaves nothing behind, and what it
            returns is returned on every rank.
        replaces: whether to replace a folder that is there.

    Raises:
        ToolkitError: on every rank, if the files cannot be written.
    """
    # Two exports to one new place must not write into each other's files.
    unfinished = _unfinished_folder(to if replaces else to.with_name(f"{to.name}.{uuid.uuid4().hex}"))
    problems: list[Exception] = []

    def finish() -> Any:
        with _explained(to.parent, then):
            if problems:
                raise problems[0]
            _write_other_files(source, unfinished, settings)
        found = check(unfinished)
        if replaces:
            shutil.rmtree(to, ignore_errors=True)
        _rename(unfinished, to)
        return found

    ranks.on_first_rank(lambda: _make_folder(unfinished, to))
    try:
        _write_tensors(source, unfinished, settings)
    except (OSError, SafetensorError) as error:  # on rank 0, and all of its collectives are done
        problems.append(error)
    try:
        return ranks.on_first_rank(finish)
    finally:
        if ranks.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def _make_folder(folder: Path, to: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"--to: {str(to)!r} cannot be made: {error.strerror}; name another folder") from error


def _rename(unfinished: Path, to: Path) -> None:
    try:
        os.rename(unfinished, to)
    except OSError as error:
        raise BadInputError(f"--to: {str(to)!r} was made meanwhile; name a new folder") from error


def _write_tensors(source: ExportSource, folder: Path, settings: ExportSettings) -> None:
    """Writes the weights or the adapter, as they come. Collective."""
    if source.names is None:
        base, configuration, _ = source.trained_on
        written = write_adapter(source.model, source.tensors, folder, settings.dtype, base, configuration)
        write_per_expert(source.model, written, folder)
        return
    tensors = iter(source.tensors)
    try:
        _write_files(source.names.in_files(_on_host(tensors, source.parameters, settings.dtype)), folder, settings)
    except (OSError, SafetensorError):
        for _ in tensors:  # the other ranks still send theirs
            pass
        raise


def _write_other_files(source: ExportSource, folder: Path, settings: ExportSettings) -> None:
    base, tokenizer, files = base_of(source.model), source.tokenizer, source.files
    if source.names is None:
        write_adapter_files(base, tokenizer, folder, files, source.trained_on[2])
    else:
        write_model_files(base, tokenizer, folder, settings.dtype, files, config_of_export(base))
    limits_of(tokenizer).write(folder)
    let_others_read(folder)


def require_unread(fit: Fit) -> None:
    """Checks that the base still has the tensors that are copied from its files. Raises ExportError if it has not."""
    if not fit.unread or fit.folder is None:
        return
    with suppress(OSError, ValueError):  # gone, or cut off
        if fingerprint_of(fit.folder) == fit.origin:
            return
    raise ExportError(
        f"the base in {str(fit.folder)!r} has changed or gone since training began, and the export needs "
        f"{counted(len(fit.unread), 'tensor')} of it that transformers does not load: {listed(fit.unread)}; put the "
        "base back, and start the same command again: it goes on from the last checkpoint, if there is one"
    )


def _unfinished_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


@contextmanager
def _explained(place: Path, then: str) -> Iterator[None]:
    """Explains errors of writing an export.

    Args:
        place: the folder that the export is in.
        then: what to do once there is room.

    Raises:
        ExportError: in place of the library's error.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"the export could not be written to {str(place)!r}: {first_line(error)}; make room (`ulimit -f` raises a "
            f"limit on the size of files), and {then}"
        ) from error


def require_room(model: nn.Module, folder: Path, settings: ExportSettings) -> None:
    """Checks that the disk has room for the export. Deletes an unfinished export first.

    Raises:
        OSError: with ENOSPC, if the disk has less free space than the export needs.
    """
    shutil.rmtree(_unfinished_folder(folder), ignore_errors=True)
    needed, free = _export_bytes(model, settings), shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"it needs {needed:,} bytes in {str(folder.parent)!r}, where {free:,} are free")


def _export_bytes(model: nn.Module, settings: ExportSettings) -> int:
    """Returns the approximate bytes of the weights that an export writes. A merged quantised base takes more."""
    kept = [p for p in model.parameters() if is_whole(model, settings) or p.requires_grad]
    return sum(parameter.numel() for parameter in kept) * settings.dtype.itemsize


def let_others_read(folder: Path) -> None:
    """Gives the files of a new folder the mode that the umask implies."""
    # safetensors makes its files readable by their owner only. The mode of the folder shows the umask. Reading the
    # umask itself would mean to set it, for all threads.
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def is_whole(model: nn.Module, settings: ExportSettings) -> bool:
    """Returns whether the export is a whole model, and not only an adapter."""
    return settings.merge or not has_adapter(model)


def names_fact(folder: Path, stored: Set[str] | None) -> str | None:
    """Says which tensors of the base an export lacks, and which are new. Returns None if there are none.

    Args:
        folder: the folder of the export.
        stored: the names of the tensors in the base's files, or None if it had no files.
    """
    found = names_in_files(folder)
    if stored is None or found == stored:
        return None
    # An encoder's files may lack the prefix that its model has below a head.
    moved = {name: inner for name in found - stored if (inner := name.partition(".")[2]) in stored - found}
    if moved and stored <= found.union(moved.values()):
        return None
    lost, added = sorted(stored - found.union(moved.values())), sorted(found - stored - set(moved))
    differences = [f"lacks {counted(len(lost), 'tensor')} of the base: {listed(lost)}"] if lost else []
    return " and ".join(differences + ([f"has {counted(len(added), 'new tensor')}: {listed(added)}"] if added else []))


def whole_tensors(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields every tensor by name, whole on rank 0 and None on other ranks. Collective.

    Args:
        state: tensors of any shape by name; sharded ones are DTensors.
    """
    for name, tensor in state.items():
        yield name, gather_on_rank_zero(tensor)


def gather_on_rank_zero(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a whole tensor (any shape) on rank 0, and None on other ranks. Collective for DTensors."""
    if not isinstance(tensor, DTensor):
        return tensor if ranks.rank() == 0 else None
    dim, group = sharded_dim(tensor), shard_group(tensor)
    # With offload the shards are on the host, but NCCL gathers on the device.
    local = tensor.to_local().to(tensor.device_mesh.device_type)
    length = tensor_part(tensor)[dim]
    # With replicas, and tensor parallelism, every shard group gathers. Only the result of rank 0 is kept below.
    whole = _gathered_to_first(local, group, dim, length.stop - length.start)
    cut_dim, ranks_of_parts = tensor_dim(tensor), tensor_group(tensor)
    if cut_dim is not None and whole is not None:
        assert ranks_of_parts is not None
        whole = _gathered_to_first(whole, ranks_of_parts, cut_dim, tensor.shape[cut_dim])
    return whole if ranks.rank() == 0 else None


def _gathered_to_first(local: torch.Tensor, group: dist.ProcessGroup, dim: int, length: int) -> torch.Tensor | None:
    """Returns the chunks of a tensor (any shape) joined along `dim`, on the first rank of a group; else None.

    Args:
        local: this rank's chunk. The last chunks may be shorter.
        length: the entries of the whole tensor along `dim`.
    """
    size = dist.get_world_size(group)
    # Gather needs equal shapes.
    padded = local.new_zeros((*local.shape[:dim], -(-length // size), *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    first = dist.get_rank(group) == 0
    parts = [torch.empty_like(padded) for _ in range(size)] if first else None
    dist.gather(padded, parts, group=group, group_dst=0)
    if not first and padded.device.type != "cpu":
        # NCCL returns at once, and its ten minutes start then. So only one gather may wait while rank 0 writes a file.
        torch.get_device_module(padded.device).current_stream().synchronize()
    return None if parts is None else torch.cat(parts, dim).narrow(dim, 0, length)


def _on_host(
    tensors: Iterable[tuple[str, torch.Tensor | None]], trained: Set[str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields rank 0's tensors on the host, with parameters in `dtype`. Yields nothing on other ranks."""
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
    # The final name contains the number of files, which is known only at the end.
    save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(tensors)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Renames the files to the names that transformers expects, which contain the number of files."""
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


def reload(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    base: PretrainedConfig | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Loads the exported model in evaluation mode, on `device` if that surely has room, else on the host.

    Args:
        folder: the folder of the export.
        device: the preferred device.
        dtype: the dtype of the weights.
        base: the configuration of the model that an exported adapter belongs to.
        trust_remote_code: whether to run the model's own Python code, as the recipe says.
    """
    # Always set: otherwise transformers would ask on the terminal.
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
        told = read_base(folder, repr(str(folder)))
        quantise_loaded(model, None if told is None else told.quantization)
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
    dtype: torch.dtype,
) -> float:
    """Compares the trained model's logits with those of the export on one batch. Collective.

    Args:
        accelerator: the accelerator of the run.
        model: the trained model.
        reloaded: the export on rank 0, None on other ranks.
        logits_of: the objective's function that returns logits, of the same shape for both models.
        batch: a batch of the objective.
        dtype: the dtype of what was written, which may be an adapter to a base of another dtype.

    Returns:
        Rank 0's largest difference, as a share of the largest logit.

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
        tolerance = max(TOLERANCE[reloaded.dtype], TOLERANCE[dtype])
    results = ranks.gather_objects((difference, tolerance))
    require_close(*results[0])
    return results[0][0]


def require_close(difference: float, tolerance: float) -> None:
    """Checks the logits of an export.

    Raises:
        ExportError: if they differ by more than the tolerance, or by NaN.
    """
    # Written this way round, NaN is refused too.
    if not difference <= tolerance:
        raise ExportError(
            f"the exported folder gives other logits than the trained model: they differ by {difference:.1e} of the "
            f"largest, more than {tolerance:.0e}; the folder is not to be trusted"
            + (
                "; export.dtype: float32, or --dtype float32, rounds nothing"
                if tolerance > TOLERANCE[torch.float32]
                else ""
            )
        )


@torch.no_grad()
def logits_of_random_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Returns the logits of 32 random tokens: (1, 32, vocabulary), in float32."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, vocabulary, (1, 32), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}
    logits: torch.Tensor = model(**inputs).logits.float()
    return logits


def compare_logits(folder: Path, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Returns how far the exported logits of random tokens are from `expected`, (1, 32, vocabulary).

    Raises:
        ExportError: if it is more than `TOLERANCE`.
    """
    found = logits_of_random_tokens(reload(folder, torch.device("cpu"), dtype))
    difference = relative_difference(found, expected)
    require_close(difference, TOLERANCE[dtype])
    return difference


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference of two tensors of one shape, as a share of the largest element of `b`."""
    # Logits that are all zero would divide by zero.
    return (_largest(a - b) / _largest(b).clamp_min(1e-30)).item()


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the largest absolute element, without a second tensor of that size; NaN if there is one."""
    return torch.stack(torch.aminmax(tensor)).abs().max()
