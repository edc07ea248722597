"""The private names of torch and Accelerate that plugin.py and apply.py lean on are still there.

When one of these fails after an upgrade, the named place in toolkit/sharding is what to mend.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

from toolkit.sharding.plugin import SUPPORTED_VERSIONS


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_the_accelerator_asks_the_parallelism_config_for_the_mesh_and_then_validates() -> None:
    text = source(Accelerator.__init__)
    asked = text.index("self.parallelism_config.get_device_mesh(self.device.type)")
    validated = text.index("self.parallelism_config._validate_accelerator(self)")
    decided = text.index("self.native_amp = False")
    assert asked < validated < decided, "ShardingMesh must enter the state before precision is decided"


def test_prepare_calls_set_auto_wrap_policy_before_it_wraps() -> None:
    text = source(Accelerator._prepare_fsdp2)
    called = text.index("self.state.fsdp_plugin.set_auto_wrap_policy(model)")
    assert text.index("self._prepare_one(obj, first_pass=True)") < called < text.index("fsdp2_prepare_model")


def test_accelerate_leaves_a_model_that_is_sharded_already() -> None:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    assert "isinstance(model, FSDPModule)" in source(fsdp2_prepare_model)


def test_names_of_accelerate() -> None:
    assert "self._optimizers = []" in source(Accelerator.__init__)
    assert "self.ddp_handler = None" in source(Accelerator.__init__)
    assert callable(ParallelismConfig._validate_accelerator)
    assert callable(AcceleratorState._reset_state)
    assert callable(GradientState._reset_state)
    assert "distributed_type" in source(PartialState.__init__)
    assert "FSDP_VERSION" in source(FullyShardedDataParallelPlugin.__post_init__) or "VERSION" in source(
        FullyShardedDataParallelPlugin.__post_init__
    )


def test_optimizers_are_mapped_by_data_ptr_of_the_local_tensor() -> None:
    """Why empty shards need a pointer of their own; when this goes, `_tell_empty_shards_apart` can go."""
    assert "p._local_tensor.data_ptr() if isinstance(p, DTensor) else p.data_ptr()" in source(
        Accelerator._prepare_fsdp2
    )


def test_public_methods_of_fsdp2() -> None:
    for name in (
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
        "set_reshard_after_backward",
        "reshard",
        "unshard",
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
    ):
        assert callable(getattr(FSDPModule, name)), name


def test_private_names_of_fsdp2() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    assert "_modules_to_run_forward: set" in source(_fsdp_state.FSDPState.__init__)
    gather = list(inspect.signature(collectives.DefaultAllGather.__call__).parameters)
    reduction = list(inspect.signature(collectives.DefaultReduceScatter.__call__).parameters)
    assert gather == ["self", "output_tensor", "input_tensor", "group", "async_op"]
    assert reduction == ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
    assert list(inspect.signature(collectives.DefaultAllGather.allocate).parameters) == [
        "self",
        "size",
        "dtype",
        "device",
    ]
    for name in ("foreach_all_gather", "foreach_reduce"):
        assert "_comm.allocate(" in source(getattr(collectives, name)), name


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for package, allowed in SUPPORTED_VERSIONS.items():
        assert f"{package}{allowed}" in project["dependencies"]
    assert torch.__version__ >= "2.11"


def test_what_memory_report_reads_of_fsdp2() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    assert "_fsdp_param_group" in source(_fsdp_state)
    assert "_partial_reduce_output" in source(_fsdp_param_group)
    text = source(_fsdp_param)
    for name in ("_sharded_param_data", "sharded_param", "_unsharded_param", "all_gather_outputs"):
        assert f"self.{name}" in text, name
    assert "unsharded_accumulated_grad" in text


def test_what_verify_takes_of_the_launcher() -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    assert callable(launch_command_parser)
    assert "return args, defaults, mp_from_config_flag" in source(_validate_launch_command)


def test_what_offload_takes_of_fsdp2() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    for name in ("set_all_reduce_hook", "set_custom_all_gather"):
        assert callable(getattr(FSDPModule, name)), name
    gather = source(_fsdp_collectives.foreach_all_gather)
    allocated = gather.index("all_gather_comm.allocate(")
    assert allocated < gather.index("all_gather_copy_in("), "the gate must close before the shards are read"
    reduce = source(_fsdp_collectives.foreach_reduce)
    hooked = reduce.index("all_reduce_hook(reduce_output)")
    rounded = reduce.index("_to_dtype_if_needed(reduce_output, orig_dtype)")
    assert hooked < rounded < reduce.index("hook(fsdp_param.sharded_param)"), "gradients are taken before they round"
    assert "dtype=dtype, device=device" in gather


def test_what_the_reuse_of_reduced_gradients_takes_of_fsdp2() -> None:
    """`fsdp.reduce_again_after`: which streams FSDP2 uses, and that it holds what it reduces across replicas."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    reduce = source(_fsdp_collectives.foreach_reduce)
    on_reduce_scatter_stream = reduce.index("with device_handle.stream(reduce_scatter_stream):")
    assert on_reduce_scatter_stream < reduce.index("reduce_output = reduce_scatter_comm.allocate(")
    group = source(_fsdp_param_group.FSDPParamGroup)
    assert "self.comm_ctx.reduce_scatter_stream," in group
    assert "def _is_hsdp(self)" in group
    assert "self._all_reduce_state = AllReduceState(" in group


def test_what_offload_takes_of_dtensor() -> None:
    """`apply.beside`: a DTensor whose local part lies on the host."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert {"mesh", "placements", "tensor_meta"} <= set(inspect.signature(DTensorSpec).parameters)
    assert TensorMeta._fields == ("shape", "stride", "dtype")


def test_an_optimizer_without_gradients_does_nothing() -> None:
    """After the engine's step hook the optimizer's own step runs, and must find nothing to do."""
    from torch import nn

    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=1.0, weight_decay=0.5)
        optimizer.step()
        assert torch.equal(parameter, torch.ones(3))
        assert not optimizer.state[parameter]


def test_accelerates_optimizer_hands_the_step_and_zero_grad_on() -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    assert "self.optimizer.step(closure)" in source(AcceleratedOptimizer.step)
    assert "self.optimizer.zero_grad(set_to_none=set_to_none)" in source(AcceleratedOptimizer.zero_grad)
