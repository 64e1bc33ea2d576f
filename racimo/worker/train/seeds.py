"""Seeds derived from what a random number is for, so that they depend on the step and never on the worker."""

import hashlib
import random

import numpy
import torch

State = tuple[torch.Tensor, list[torch.Tensor], object, dict[str, object]]


def derive(*parts: int | str) -> int:
    """A 63-bit seed from its parts; different parts give unrelated seeds."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_all(seed: int) -> None:
    """Seeds torch (CPU, and CUDA once it is in use), numpy and `random`. Called for each micro-shard, so it is quick:
    `torch.manual_seed` formats a stack trace for devices that may be initialised later, which takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    numpy.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)


def capture() -> State:
    """The generators' states, to be given to `restore`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state(legacy=False)


def restore(state: State) -> None:
    cpu, cuda, python, numpy_state = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)  # type: ignore[arg-type]
    numpy.random.set_state(numpy_state)
