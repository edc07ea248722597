"""Lists the tested versions of the libraries below, and the private names that the toolkit depends on.

An untested newer version gives a warning, not an error. All private names are checked first, so that a release that
moved one stops the run at once and by name, not in the middle of a step.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import warnings
from dataclasses import dataclass
from importlib.metadata import version as installed_version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from toolkit.errors import BadInputError
from toolkit.ranks import rank

SUPPORTED_VERSIONS = {
    "torch": ">=2.11,<2.16",
    "accelerate": ">=1.13,<1.16",
    "transformers": ">=5.24,<5.25",
    "datasets": ">=4.7,<5.3",
    "peft": ">=0.21.2,<0.22",
}
"""The versions that this package is tested with, as in pyproject.toml; of peft, that has no upper limit."""


@dataclass(frozen=True)
class PrivateName:
    """A private name of a library, and the source text that the toolkit relies on.

    Attributes:
        place: "module:qualified.name".
        holds: texts that its source must contain in this order. A tuple lists alternatives for different versions.
    """

    place: str
    holds: tuple[str | tuple[str, ...], ...] = ()

    def problem(self) -> str | None:
        """Returns what is missing, or None if everything is in place."""
        try:
            text = _source(self.place)
        except (ImportError, AttributeError) as error:
            return f"{self.place}: {error}"
        start = 0
        for wanted in self.holds:
            spellings = (wanted,) if isinstance(wanted, str) else wanted
            places = [place for spelling in spellings if (place := text.find(spelling, start)) >= 0]
            if not places:
                return f"{self.place} holds no {' or '.join(map(repr, spellings))} where it is expected"
            start = min(places)
        return None


@functools.cache
def _source(place: str) -> str:
    """Returns the source text of a place. Raises ImportError or AttributeError if it is not there."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return inspect.getsource(operator.attrgetter(name)(found) if name else found)


_FSDP = "torch.distributed.fsdp._fully_shard."
_COLLECTIVES, _GROUP, _STATE = f"{_FSDP}_fsdp_collectives:", f"{_FSDP}_fsdp_param_group", f"{_FSDP}_fsdp_state"

_MODEL = "transformers:PreTrainedModel"

PRIVATE_NAMES = (
    # plugin.py: the mesh is asked for, and ShardingMesh enters the state, before precision is decided.
    PrivateName(
        "accelerate:Accelerator.__init__",
        (
            "self.parallelism_config.get_device_mesh(self.device.type)",
            "self.parallelism_config._validate_accelerator(self)",
            "self.native_amp = False",
        ),
    ),
    PrivateName("accelerate:Accelerator.__init__", ("self._optimizers = []",)),
    PrivateName("accelerate:Accelerator.__init__", ("self.ddp_handler = None",)),
    PrivateName("accelerate:ParallelismConfig._validate_accelerator"),
    PrivateName("accelerate.state:AcceleratorState._reset_state"),
    PrivateName("accelerate.state:GradientState._reset_state"),
    PrivateName("accelerate.state:PartialState.__init__", ("distributed_type",)),
    PrivateName("accelerate.utils:FullyShardedDataParallelPlugin.__post_init__", ("VERSION",)),
    # loss_scale.py: both ways in which the scaler looks for infinities go through one method.
    PrivateName("torch.amp.grad_scaler:GradScaler.unscale_", ('["found_inf_per_device"] = self._unscale_grads_(',)),
    PrivateName("torch.amp.grad_scaler:GradScaler._check_inf_per_device", ("self._unscale_grads_(",)),
    # plugin.py: prepare shards through set_auto_wrap_policy before it wraps, and leaves a sharded model alone.
    PrivateName(
        "accelerate:Accelerator._prepare_fsdp2",
        (
            "self._prepare_one(obj, first_pass=True)",
            "self.state.fsdp_plugin.set_auto_wrap_policy(model)",
            "fsdp2_prepare_model",
        ),
    ),
    PrivateName("accelerate.utils.fsdp_utils:fsdp2_prepare_model", ("isinstance(model, FSDPModule)",)),
    # plugin.py: the mesh has the axis that Accelerate's own gives to those who shard a second model.
    PrivateName("accelerate:ParallelismConfig.fsdp_dim_names.fget", ('"dp_shard_cp"',)),
    PrivateName("torch.distributed.device_mesh:DeviceMesh._flatten", ("mesh_dim_name",)),
    # Why empty shards need a pointer of their own; when this goes, `_tell_empty_shards_apart` can go.
    PrivateName(
        "accelerate:Accelerator._prepare_fsdp2",
        ("p._local_tensor.data_ptr() if isinstance(p, DTensor) else p.data_ptr()",),
    ),
    # The engine's step hook is reached through Accelerate's optimizer.
    PrivateName("accelerate.optimizer:AcceleratedOptimizer.step", ("self.optimizer.step(closure)",)),
    PrivateName(
        "accelerate.optimizer:AcceleratedOptimizer.zero_grad", ("self.optimizer.zero_grad(set_to_none=set_to_none)",)
    ),
    # fsdp.py, unit_states.py, fsdp_replaced.py: the record of the units.
    PrivateName(f"{_STATE}:FSDPState.__init__", ("_modules_to_run_forward: set",)),
    PrivateName(_STATE, ("_fsdp_param_group",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup.post_backward"),
    PrivateName(f"{_GROUP}:FSDPParamGroup.unshard"),
    # UnitStates.window, return_to_forward: a backward in the midst of a forward frees nothing of the root.
    PrivateName(f"{_STATE}:FSDPState._root_post_backward_final_callback", ("fsdp_param_group.post_backward()",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup.reshard", ("self._training_state == TrainingState.FORWARD",)),
    # fsdp_replaced.gather_in_float32: types are a parameter's own, gathered as bytes if they differ.
    PrivateName(f"{_FSDP}_fsdp_param:FSDPParam.init_dtype_attrs", ("mp_policy", "self.reduce_dtype = reduce_dtype")),
    PrivateName(f"{_COLLECTIVES}foreach_all_gather", ("dtype == torch.uint8",)),
    # fsdp_replaced.wrap_as_dtensor: what a unit's shards are shown as; gloo.average_over: how gradients are divided.
    PrivateName(
        f"{_FSDP}_fsdp_param:FSDPParam.reset_sharded_param", ("self._sharding_spec = self.sharded_param._spec",)
    ),
    PrivateName(f"{_FSDP}_fsdp_param:FSDPParam.to_sharded_dtensor", ("self._sharding_spec",)),
    PrivateName(f"{_FSDP}_fsdp_param:FSDPParam._setattr_on_modules", ("param",)),
    PrivateName(f"{_FSDP}_fsdp_param:ParamModuleInfo", ("param_name",)),
    PrivateName(
        f"{_COLLECTIVES}foreach_reduce", ("reduce_output.copy_(reduce_scatter_input / gradient_divide_factor)",)
    ),
    # UnitStates.backward_by_unit, end_passes: when FSDP2 ends the passes of all units.
    PrivateName(
        f"{_STATE}:FSDPState._register_root_post_backward_final_callback",
        ("if self._state_ctx.post_backward_final_callback_queued:",),
    ),
    # UnitStates.free_all: which forward waits for the optimizer.
    PrivateName(
        f"{_STATE}:FSDPState._root_pre_forward",
        ("if self._state_ctx.iter_forward_root is not None:", "self._state_ctx.iter_forward_root = self"),
    ),
    # UnitStates.free_all: what a unit keeps from forward to backward inside a group.
    PrivateName(
        f"{_FSDP}_fsdp_param:FSDPParam.to_unsharded",
        ("self._sharded_post_forward_param = None", "self._sharded_post_forward_param_data = None"),
    ),
    PrivateName(f"{_GROUP}:FSDPParamGroup.finalize_backward", ("self._post_forward_indices.clear()",)),
    PrivateName(f"{_FSDP}_fsdp_collectives", ("if fsdp_param.fsdp_placement.dim != 0:",)),
    # planning: what is copied of parameters that are not sharded by rows.
    PrivateName(f"{_FSDP}_fsdp_collectives", ("torch.empty_like(t)", "unsharded_grads[i] = torch.cat(chunks, dim=0)")),
    PrivateName(f"{_GROUP}:FSDPParamGroup", ("self.post_forward_mesh_info = post_forward_mesh_info",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup", ("def is_sharded(self)", "def is_sharded_post_forward(self)")),
    # UnitStates.free_all: what a backward prefetches.
    PrivateName(
        f"{_GROUP}:FSDPParamGroup._backward_prefetch",
        ("self._post_forward_indices.pop()", "self.comm_ctx.post_forward_order"),
    ),
    # fsdp.frees_gather_before_copying, fsdp.frees_all_gradients_before_reducing, fsdp.autograd_sums_gradients: the
    # classes that tell versions apart.
    PrivateName(f"{_GROUP}:FSDPCommContext"),
    PrivateName(f"{_GROUP}:FSDPParamGroup"),
    PrivateName(f"{_FSDP}_fsdp_param:FSDPParam"),
    # memory.py: what a unit holds.
    PrivateName(_GROUP, ("_partial_reduce_output", "self.all_reduce_grads")),
    *(
        PrivateName(f"{_FSDP}_fsdp_param", (name,))
        for name in (
            "self._sharded_param_data",
            "self.sharded_param",
            "self._unsharded_param",
            "self.all_gather_outputs",
            "unsharded_accumulated_grad",
        )
    ),
    # apply.py: our collectives take the place of FSDP2's own.
    PrivateName(
        f"{_COLLECTIVES}DefaultAllGather.__call__", ("output_tensor", "input_tensor", "group", "async_op", ") ->")
    ),
    PrivateName(
        f"{_COLLECTIVES}DefaultReduceScatter.__call__",
        ("output_tensor", "input_tensor", "group", "op", "async_op", ") ->"),
    ),
    PrivateName(f"{_COLLECTIVES}DefaultAllGather.allocate", ("size", "dtype", "device")),
    # offload: the gate closes before the shards are read; gradients are taken before they are rounded.
    PrivateName(
        f"{_COLLECTIVES}foreach_all_gather",
        ("all_gather_comm.allocate(", "dtype=dtype, device=device", "all_gather_copy_in("),
    ),
    PrivateName(
        f"{_COLLECTIVES}foreach_reduce",
        (
            "with device_handle.stream(reduce_scatter_stream):",
            "reduce_output = reduce_scatter_comm.allocate(",
            "all_reduce_hook(reduce_output)",
            # 2.15 casts each parameter's gradient to the parameter's own type, in a separate function.
            ("_to_dtype_if_needed(reduce_output, orig_dtype)", "_cast_and_view_sharded_grads("),
            "hook(fsdp_param.sharded_param)",
        ),
    ),
    # fsdp_replaced.before_copying_shards: if one rank gathers nothing, one method makes each copy of the shards.
    PrivateName(
        f"{_GROUP}:FSDPParamGroup.wait_for_unshard",
        ("if not self._all_gather_result:", "fsdp_param.all_gather_inputs[0]"),
    ),
    PrivateName(f"{_GROUP}:FSDPParamGroup.pre_forward", ("self.wait_for_unshard()",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup.pre_backward", ("self.wait_for_unshard()",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup", ("def _all_gather_process_group(self)",)),
    # fsdp_replaced.reduce_again_after: the stream, and what is held of a reduction across replicas.
    PrivateName(f"{_GROUP}:FSDPParamGroup", ("def _is_hsdp(self)",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup", ("self.comm_ctx.reduce_scatter_stream,",)),
    PrivateName(f"{_GROUP}:FSDPParamGroup", ("self._all_reduce_state = AllReduceState(",)),
    # shards.beside: a DTensor whose local part is on the host.
    PrivateName(
        "torch.distributed.tensor._dtensor_spec:DTensorSpec", ("mesh: DeviceMesh", "placements:", "tensor_meta:")
    ),
    PrivateName("torch.distributed.tensor._dtensor_spec:TensorMeta", ("shape:", "stride:", "dtype:")),
    # units.py: without these marks other modules would be units, and experts would be parameters like any other.
    PrivateName(_MODEL, ("_no_split_modules:",)),
    PrivateName("transformers.integrations.moe:use_experts_implementation", ("self._is_expert_parallel = ",)),
    # precision.py, model/weights/file_names.py: which parameters stay in float32; a model of a configuration.
    PrivateName(f"{_MODEL}._from_config", ("config",)),
    PrivateName(f"{_MODEL}._get_dtype_plan", ("dtype",)),
    # model/routers.py: without the record a mixture would train without its balance loss.
    PrivateName(f"{_MODEL}.can_record_outputs.fget", ("self._can_record_outputs",)),
    PrivateName("transformers.utils.output_capturing:OutputRecorder", ("target_class:", "index:", "layer_name:")),
    # model/weights/weights.py, model/possible_configs.py: which tensors loading passes over, and what it draws again.
    PrivateName(_MODEL, ("_keys_to_ignore_on_load_unexpected:",)),
    PrivateName(f"{_MODEL}._init_weights", ("module",)),
    PrivateName("transformers.initialization", ("_is_hf_initialized",)),
    # model/weights/file_names.py, model/adapters/adapter_names.py: the names of tensors in files.
    PrivateName("transformers.conversion_mapping:get_model_conversion_mapping", ("add_legacy",)),
    PrivateName("transformers.core_model_loading:revert_weight_conversion", ('"_weight_conversions"',)),
    PrivateName("transformers.core_model_loading:rename_source_key", ("reverse",)),
    PrivateName("transformers.core_model_loading:PrefixChange"),
    # model/structure/model_parts.py: which types an auto class builds.
    PrivateName("transformers.models.auto.auto_factory:_BaseAutoModelClass", ("_model_mapping",)),
    # model/attention/attention.py, objectives/losses/balance.py: the kernels, and how rows of several documents are
    # recognised.
    PrivateName(_MODEL, ("_supports_flash_attn:",)),
    PrivateName("transformers:PretrainedConfig._attn_implementation.fget"),
    PrivateName("transformers:PretrainedConfig._experts_implementation.fget"),
    PrivateName(
        "transformers.masking_utils:_preprocess_mask_arguments", ("find_packed_sequence_indices(position_ids)",)
    ),
    *(
        PrivateName(f"transformers.masking_utils:{make}", ("remap_positions_for_packed_sequence(\n",))
        for make in ("create_causal_mask", "create_sliding_window_causal_mask")
    ),
    PrivateName(
        "transformers.masking_utils:create_chunked_causal_mask",
        ("chunked_causal_mask_function(chunk_size,", "remap_positions_for_packed_sequence(\n"),
    ),
    # model/structure/fake_tensors.py: which product of experts a plan runs.
    PrivateName("transformers.integrations.moe:_can_use_grouped_mm", ("input", "weight", "offs")),
    PrivateName("transformers.integrations.moe:_grouped_mm", ("_can_use_grouped_mm(",)),
    # model/adapters/adapters.py: what switches adapters off for a reference.
    *(
        PrivateName(f"{layer}.{method}", (text,))
        for layer in ("peft.tuners.tuners_utils:BaseTunerLayer", "peft.utils.other:AuxiliaryTrainingWrapper")
        for method, text in (
            ("enable_adapters", "self._disable_adapters = True"),
            ("disable_adapters.fget", "return self._disable_adapters"),
        )
    ),
    # data/rows/sources.py: what identifies the rows of a data set of the hub.
    PrivateName("datasets:Dataset.__init__", ("self._fingerprint",)),
)


def check_versions() -> None:
    """Checks the installed versions of the libraries.

    Warns on rank 0 about a version newer than those tested.

    Raises:
        BadInputError: if a version is too old, or a newer one has moved a private name.
    """
    newer = []
    for package, allowed in SUPPORTED_VERSIONS.items():
        found, (oldest, _) = installed_version(package), allowed.split(",")
        plain = Version(found).base_version
        if not SpecifierSet(oldest).contains(plain):
            raise BadInputError(f"{package} {found} is installed, but the toolkit needs {package}{allowed}")
        if not SpecifierSet(allowed).contains(plain):
            newer.append(f"{package} {found} is newer than the tested {package}{allowed}")
    if newer:
        _check_private_names("; ".join(newer))


def _check_private_names(versions: str) -> None:
    moved = [problem for name in PRIVATE_NAMES if (problem := name.problem()) is not None]
    if moved:
        raise BadInputError(
            f"{versions}, and private names that the toolkit uses have moved: {'; '.join(moved)}; install a "
            "tested version"
        )
    if rank() == 0:
        warnings.warn(f"{versions}; all private names are in place, so it is tried", stacklevel=3)
