"""What user code does inside its loop that would break the promise without a sign. Cheap: no values are read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from racimo.spec.errors import RacimoError


class Buffers:
    """Buffers must not change while a micro-shard is computed: who computes which is not fixed, and what changed stays
    with that worker. One that appears is let pass (a mask made when first needed)."""

    def __init__(self, model: torch.nn.Module) -> None:
        # The modules' own dictionaries: a buffer may also be replaced by assignment.
        self._owners = [(f"{name}." if name else "", module._buffers) for name, module in model.named_modules()]
        self._before: list[tuple[int, str, torch.Tensor, int]] = []

    def remember(self) -> None:
        self._before = [
            (owner, name, buffer, _version(buffer))
            for owner, (_, buffers) in enumerate(self._owners)
            for name, buffer in buffers.items()
            if buffer is not None
        ]

    def refuse_change(self) -> None:
        """Raises `not-exact` with the name of a buffer that is not what it was at `remember`."""
        for owner, name, buffer, version in self._before:
            prefix, buffers = self._owners[owner]
            if buffers.get(name) is not buffer or _version(buffer) != version:
                raise RacimoError(
                    "not-exact",
                    f"the buffer {prefix}{name} changed while a micro-shard was computed: "
                    "what it holds depends on which worker saw which samples",
                    "change it after step.apply(), the same on all workers, or call its module's .eval(), or use a "
                    'layer without running statistics, or ask for coherence="fast"',
                )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Trainable:
    """The set of trainable parameters stays what it was: only their gradients are summed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._named = list(model.named_parameters())
        self._flags = [parameter.requires_grad for _, parameter in self._named]

    def refuse_change(self) -> None:
        """Raises `steps-misused` with the name of a parameter that was frozen or unfrozen since."""
        for (name, parameter), was in zip(self._named, self._flags, strict=True):
            if parameter.requires_grad != was:
                raise RacimoError(
                    "steps-misused",
                    f"the parameter {name} was {'frozen' if was else 'unfrozen'} inside the loop over run.steps, "
                    f"which sums the gradients of those that were trainable when it began",
                    "set requires_grad before run.steps; to hold a layer still for a while, give it a parameter group "
                    "with lr=0",
                )


class Updates:
    """Nobody but `step.apply()` updates the model: between `open` and `close` any other `step()` of an optimizer of the
    model's parameters raises `steps-misused`, before it has changed anything."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._owned = {id(parameter) for parameter in model.parameters()}
        self._optimizers = optimizers
        self._applying = False
        self._hook: Any = None

    def open(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def apply(self) -> None:
        """One update by each optimizer, in the order in which they were given."""
        self._applying = True
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            self._applying = False

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._applying:
            return
        kind = type(optimizer).__name__
        if any(optimizer is ours for ours in self._optimizers):
            raise RacimoError(
                "steps-misused",
                f"{kind}.step() was called inside the loop over run.steps: step.apply() does it, once per step",
                "delete the call of optimizer.step()",
            )
        if any(id(parameter) in self._owned for group in optimizer.param_groups for parameter in group["params"]):
            raise RacimoError(
                "steps-misused",
                f"{kind}.step() updates the model, but run.steps does not know this optimizer",
                "give all optimizers: run.steps(model, (first, second), batches, ...); step.apply() steps each of them",
            )
