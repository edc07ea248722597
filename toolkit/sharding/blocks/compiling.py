"""Compiles each block's forward with torch.compile: one graph for all equal blocks, below FSDP2's hooks.

The graph of a whole model grows with its depth, and FSDP2's hooks break it at each unit. The forward of a single block
contains no hook, and equal blocks share its code, its guards and so its graph.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.sharding.plan.unit_plan import UnitPlan


@dataclass
class Compilation:
    """How blocks are compiled, and whether that worked.

    Attributes:
        backend: the backend of torch.compile.
        problem: why the blocks run eagerly after all, or None if they are compiled.
    """

    backend: str = "inductor"
    problem: str | None = None

    def describe(self) -> str:
        """Returns a line that says how the blocks run."""
        if self.problem is not None:
            return f"eager: the blocks could not be compiled ({self.problem})"
        return f"each block compiled ({self.backend})"


def forget_compiled_steps() -> None:
    """Makes torch recompile the steps of torchao's optimizers in each process.

    torch caches them on disk and would load the 4-bit step for the 8-bit one, because the cache key does not tell
    torchao's tensors apart. torchao warns of this.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    config.enable_autograd_cache = False


def compile_blocks(model: nn.Module, plan: UnitPlan, compilation: Compilation) -> None:
    """Compiles the forward of each block in place. If that fails, warns once and runs all blocks eagerly.

    Call this before `checkpoint_blocks`: a checkpoint calls the compiled forward twice, with its own random state.
    """
    torch.compiler.reset()  # graphs of an earlier run in this process count towards the limit of recompilations
    # Otherwise the backward is compiled when it runs, and then it is too late to run a block eagerly.
    config: Any = importlib.import_module("torch._functorch.config")
    config.force_non_lazy_backward_lowering = True
    for path in (path for unit in plan.blocks for path in unit.modules):
        block = model.get_submodule(path)
        block.forward = _compiled_or_eager(block.forward, compilation)


def _compiled_or_eager(forward: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import, so only if needed

    compiled = torch.compile(forward, backend=compilation.backend)
    has_run = False

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if compilation.problem is not None:
            return forward(*args, **kwargs)
        try:
            found = compiled(*args, **kwargs)
        except Exception as error:
            # Raised while compiling, or by a graph that assumes strides that tensors do not have. Once a graph has
            # run, an error is one of its inputs.
            if has_run and not isinstance(error, TorchDynamoException):
                raise
            found = forward(*args, **kwargs)  # raises the error itself if it is not the compiler's
            compilation.problem = " ".join(str(error).split("\n")[:2])  # what failed, and how
            warnings.warn(f"training.compile: {compilation.describe()}; the run goes on", stacklevel=2)
        has_run = True
        return found

    return run
