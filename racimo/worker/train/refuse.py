"""What `run.steps` cannot keep its promise for is refused before the first step, with the reason."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from racimo.spec.errors import RacimoError


def refuse_what_cannot_be_kept(
    model: torch.nn.Module, optimizers: Sequence[Any], state: Mapping[str, Any], exact: bool
) -> None:
    """Raises a `RacimoError` with code `own-collectives`, `not-exact`, `state-not-stateful` or `steps-misused`."""
    _refuse_own_collectives(model)
    _refuse_batch_norm(model, exact)
    for name, stateful in state.items():
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise RacimoError(
                "state-not-stateful",
                f"state={{{name!r}: {type(stateful).__name__}}} has no state_dict and load_state_dict",
                "pass objects that have both, or wrap the value in a class that does",
            )
    if not optimizers:
        raise RacimoError("steps-misused", "run.steps was given no optimizer", "pass one, or a tuple of some")
    for optimizer in optimizers:
        _refuse_strange_optimizer(model, optimizer)


def _refuse_own_collectives(model: torch.nn.Module) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RacimoError(
            "own-collectives",
            "torch.distributed is initialised in this worker: its groups cannot follow when workers come and go",
            "leave init_process_group out, or run the script without run.steps, as torchrun would",
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise RacimoError(
                "own-collectives",
                f"{name or 'the model'} is wrapped in {kind}, which sums gradients itself",
                "pass the bare model to run.steps",
            )


def _refuse_batch_norm(model: torch.nn.Module, exact: bool) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise RacimoError(
                "not-exact",
                f"{name} is SyncBatchNorm, which talks to other workers in every forward pass",
                "use GroupNorm or LayerNorm",
            )
        if exact and isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise RacimoError(
                "not-exact",
                f"{name} is {type(module).__name__}: its running statistics depend on which worker saw which samples",
                'use GroupNorm or LayerNorm, or freeze it with .eval(), or ask for coherence="fast"',
            )


def _refuse_strange_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RacimoError(
            "steps-misused",
            f"run.steps takes a torch.optim.Optimizer as its second argument, not a {type(optimizer).__name__}",
            "pass the model, then the optimizer, then the batches",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RacimoError(
            "steps-misused",
            "LBFGS computes the loss itself, several times per step, which step.apply() cannot share out",
            "use an optimizer whose step() needs no closure, such as AdamW",
        )
    owned = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(p) not in owned for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise RacimoError(
            "steps-misused",
            f"the optimizer updates {strangers} parameters that are not the model's",
            "build the optimizer from model.parameters(), after the model has its final shape",
        )
    devices = {str(parameter.device) for parameter in model.parameters() if parameter.requires_grad}
    if len(devices) != 1:
        found = ", ".join(sorted(devices)) or "none"
        raise RacimoError(
            "steps-misused",
            f"a worker trains one model on one device; its trainable parameters lie on: {found}",
            "move the whole model to one device and leave at least one parameter trainable",
        )
