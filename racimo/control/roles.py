"""Which services a machine has, by what its home says, and how each is started and ended. Standard library only."""

import json
import os

from racimo.act import guardian
from racimo.control.supervisor_log import say

MODULES = {"agent": "racimo.agent", "control": "racimo.control", "ray": "racimo.act.ray"}
END_FIRST = ("control", "ray")
"""What ends before the agent: the control process tells the agent to end workers and itself."""
END_MOST_S = {"control": 60.0, "ray": 20.0, "agent": 15.0, "watch": 2.0}
"""How long a service may take to end by itself at shutdown, before SIGKILL."""
AGENT_BY_ITSELF_S = 0.5
RAY_DELAY_MOST_S = 30.0
"""Between starts of a Ray part that ends again and again: the node is up without it."""


def roles_of(root: str) -> list[str]:
    """The services of this home. A machine that joined has no control process; something small watches the supervisor
    there in its stead, so that here too any two of them may die at once. Ray only where that carrier was chosen."""
    joined = read_json(root, "join.json")
    if joined is not None:
        return ["agent", "watch", *(["ray"] if joined.get("carrier") == "ray" else [])]
    config = read_json(root, "config.json") or {}
    return ["agent", "control", *(["ray"] if config.get("bind") and config.get("carrier") == "ray" else [])]


def has_joined(root: str) -> bool:
    """Whether this home is a node of another machine's cluster."""
    return os.path.exists(os.path.join(root, "join.json"))


def agent_arguments(root: str) -> list[str]:
    """What `racimo up` or `join` was told (config.json), as options of the agent."""
    config = read_json(root, "config.json") or {}
    arguments = []
    for option in ("slots", "price"):
        if config.get(option) is not None:
            arguments += [f"--{option}", str(config[option])]
    return arguments


def read_json(root: str, name: str) -> dict[str, object] | None:
    """The content of a file of the home; None without one. A damaged one counts as empty, and that is said."""
    try:
        with open(os.path.join(root, name)) as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"{name} is not readable ({error}): going on with defaults")
        return {}
    return content if isinstance(content, dict) else {}


def program_of(role: str, root: str) -> list[str]:
    """The arguments of Python that start this service."""
    if role == "watch":
        return guardian.light_program("racimo.act.guardian", root)
    options = agent_arguments(root) if role == "agent" else []
    return ["-P", "-m", MODULES[role], "--home", root, *options]
