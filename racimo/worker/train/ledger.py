"""What this worker has computed of the present step: blocks of the tree, accumulated while backward runs.

Each parameter's gradient is moved into shared memory the moment autograd has finished it (a post-accumulate hook), so
it is still in the cache, its own memory is free for the next one, and every merge up the tree that has become possible
is done in the same visit.
"""

from collections.abc import Collection, Sequence

import torch

from racimo.spec.errors import RacimoError
from racimo.worker.train.buffers import REDUCED_SLOT, Store
from racimo.worker.train.messages import Holding
from racimo.worker.train.tree import FAST_LEVEL, Block, Tree, parent, sibling


class _Held:
    """One block in hand."""

    def __init__(self, slot: int, num_parameters: int) -> None:
        self.slot = slot
        self.leaves: set[int] = set()
        self.weight = 0.0
        self.weighted_loss = 0.0
        self.num_samples = 0
        self.used = bytearray(-(-num_parameters // 8))

    def absorb(self, other: "_Held") -> None:
        self.leaves |= other.leaves
        self.weight += other.weight
        self.weighted_loss += other.weighted_loss
        self.num_samples += other.num_samples
        self.used = bytearray(a | b for a, b in zip(self.used, other.used, strict=True))


class Ledger:
    """Blocks held, and the plan for the micro-shard whose backward pass runs."""

    def __init__(self, store: Store, names: Sequence[str], exact: bool) -> None:
        self._store = store
        self._names = names
        self._exact = exact
        self._held: dict[Block, _Held] = {}
        self._free = list(range(store.num_slots - 1, REDUCED_SLOT, -1))
        self._tree: Tree | None = None
        self._leaf: int | None = None
        self._collecting = False
        self._fired = [False] * len(names)
        self._plan: list[list[torch.Tensor]] = []
        self._fresh = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(store.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, tree: Tree) -> None:
        """A new step: nothing is held, and until `end` every gradient has to come through `backward`."""
        self._tree = tree
        self._collecting = True
        self.keep(())

    def end(self) -> None:
        """The step's gradient is about to be in place: what the user adds to it from here on is the user's."""
        self._collecting = False

    def keep(self, blocks: Collection[Block]) -> None:
        """Drops every block but these."""
        for block in [block for block in self._held if block not in blocks]:
            self._release(self._held.pop(block).slot)

    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(
                level=level,
                index=index,
                slot=held.slot,
                leaves=tuple(sorted(held.leaves)),
                weight=held.weight,
                weighted_loss=held.weighted_loss,
                num_samples=held.num_samples,
                used=bytes(held.used),
            )
            for (level, index), held in self._held.items()
        )

    def backward(self, leaf: int, loss: torch.Tensor, weight: float, scale: float, num_samples: int) -> None:
        """Runs the backward pass of one micro-shard and merges its gradient as far up the tree as can be."""
        assert self._tree is not None
        chain, block = self._path(leaf)
        fresh = not chain
        target = chain[0] if chain else None
        one = _Held(self._free.pop() if fresh else -1, len(self._names))
        slots = [one.slot] if fresh else [self._held[step].slot for step in chain]
        self._plan = [self._store.views(slot) for slot in slots]
        self._fresh = fresh
        self._fired = [False] * len(self._names)
        self._store.drop_gradients()
        self._leaf = leaf
        try:
            (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            # The blocks on the path may be half changed; the worker is about to leave its loop.
            for step in chain:
                del self._held[step]
            raise
        finally:
            self._leaf = None
        self._settle_unused()
        one.leaves, one.weight, one.num_samples = {leaf}, weight, num_samples
        one.weighted_loss = weight * float(loss.detach())
        for index, fired in enumerate(self._fired):
            if fired:
                one.used[index >> 3] |= 1 << (index & 7)
        self._merge(chain, block, one, target)

    def _path(self, leaf: int) -> tuple[list[Block], Block]:
        """The held blocks into which this leaf's gradient goes, from the bottom, and the block that results."""
        assert self._tree is not None
        if not self._exact:
            block = (FAST_LEVEL, 0)
            return ([block] if block in self._held else []), block
        block = self._tree.lift((0, leaf))
        chain = []
        while sibling(block) in self._held:
            chain.append(sibling(block))
            block = self._tree.lift(parent(block))
        return chain, block

    def _merge(self, chain: list[Block], block: Block, one: _Held, target: Block | None) -> None:
        if target is None:
            self._held[block] = one
            return
        # Scalars are added in the order in which `_visit` adds tensors: child into sibling, from the bottom up.
        for position, step in enumerate(chain):
            held = self._held.pop(step)
            held.absorb(one)
            if position + 1 < len(chain):
                self._release(held.slot)
            one = held
        self._held[block] = one

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        self._free.sort(reverse=True)

    def _hook(self, index: int):  # type: ignore[no-untyped-def]
        def take(parameter: torch.Tensor) -> None:
            if self._leaf is None:
                if self._collecting:
                    raise RacimoError(
                        "steps-misused",
                        f"a backward pass of your own reached {self._names[index]} inside the loop over a step: its "
                        "gradient would not be counted",
                        "step.backward(loss), once for each micro-shard; add several losses up before",
                    )
                return
            gradient = parameter.grad
            assert gradient is not None
            if gradient.layout != torch.strided:
                raise RacimoError(
                    "not-exact",
                    f"the gradient of {self._names[index]} is sparse ({gradient.layout}), which is not summed exactly",
                    "build the embedding with sparse=False",
                )
            if self._fired[index]:
                raise RacimoError(
                    "not-exact",
                    f"one backward pass accumulated the gradient of {self._names[index]} twice",
                    "use torch.utils.checkpoint with use_reentrant=False",
                )
            self._fired[index] = True
            parameter.grad = None
            self._visit(index, gradient)

        return take

    def _visit(self, index: int, gradient: torch.Tensor) -> None:
        views = self._plan[0][index]
        if self._fresh:
            views.copy_(gradient)
        else:
            views.add_(gradient)
        for below, above in zip(self._plan, self._plan[1:], strict=False):
            above[index].add_(below[index])

    def _settle_unused(self) -> None:
        """A parameter without a gradient counts as zeros, added like any other so that signs of zero agree."""
        for index, fired in enumerate(self._fired):
            if not fired:
                self._visit(index, torch.zeros((), dtype=self._plan[0][index].dtype, device=self._store.device))
