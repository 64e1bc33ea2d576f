"""`racimo up`, `down` and `version`."""

import argparse
from pathlib import Path

import msgspec

from racimo.cli.console import talk, write, write_json
from racimo.cli.parser import add_output, amount, count
from racimo.cli.usage import UsageError
from racimo.control.views import ClusterView
from racimo.spec.config import read_config
from racimo.spec.home import Home
from racimo.version import PROTOCOL_VERSION, __version__


def _up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slots", type=count, help="CPU slots to offer on a machine without accelerators (default: its cores)"
    )
    parser.add_argument("--price", type=amount, help="price per device-hour, so that runs show what they cost")
    parser.add_argument(
        "--bind", metavar="IP[:PORT]", help="let other machines join, at this address (prints the line to paste there)"
    )
    parser.add_argument("--from-backup", metavar="FILE", help="make the cluster of this backup again, and start it")
    parser.add_argument("--service", action="store_true", help="a systemd unit, so that it comes back after a reboot")
    parser.add_argument(
        "--carrier", choices=("link", "ray"), help="what brings machines: joining alone, or Ray as well"
    )
    add_output(parser)


def _up(args: argparse.Namespace) -> int:
    from racimo.client.start import up

    home = Home.default()
    if args.from_backup is not None:
        from racimo.client.restore import restore

        restore(home, Path(args.from_backup), talk)
    if home.join_file.exists() and args.bind is None:
        code = _up_again(home, args)
        if args.service:
            install_service(home)
        return code
    started = up(home, slots=args.slots, price=args.price, bind=args.bind, carrier=args.carrier, say=talk)
    if args.service:
        install_service(home)
    if args.output == "json":
        view = msgspec.to_builtins(started.cluster)
        write_json({**view, "join": started.join} if started.join else view)
        return 0
    talk("the cluster is up" if started.fresh else "the cluster was up already")
    say = talk if args.bind is not None else write  # then the line to paste stands alone
    for line in cluster_lines(started.cluster):
        say(line)
    if started.join:
        if args.bind is not None:
            address = f"https://{read_config(home).bind}"
            talk(f"from a laptop: export RACIMO_ADDRESS={address} RACIMO_TOKEN_FILE=FILE   # FILE holds SECRET:PIN of")
            talk("the line below, chmod 600. On each machine that is to join, type:")
        write(started.join)
    return 0


def install_service(home: Home) -> None:
    from racimo.client.units import install

    install(home, talk)


def _up_again(home: Home, args: argparse.Namespace) -> int:
    """On a machine that joined: its agent, and how it stands with the head."""
    from racimo.client.joining import link_state, start_again

    if args.carrier is not None:
        raise UsageError("racimo up: --carrier is for the head\n  racimo join --carrier link   # without Ray here")
    joined = start_again(home, talk, slots=args.slots, price=args.price)
    if joined is None:
        state = link_state(home)
        words = f" ({state.message})" if state is not None and state.message else ""
        talk(f"this node's agent runs and goes on dialling its head{words}")
        return 0
    if args.output == "json":
        write_json(joined.cluster)
        return 0
    talk(f"this machine is node {joined.node.id} of the cluster")
    for line in cluster_lines(joined.cluster, home=str(home.root)):
        write(line)
    return 0


def cluster_lines(cluster: ClusterView, *, home: str = "") -> list[str]:
    """`home`: that of this machine, where it is not the head."""
    price = cluster.price_per_device_hour
    where = f"(this machine's home {home})" if home else f"(home {cluster.home})"
    return [
        f"{cluster.num_devices} devices, {cluster.num_free} free, at {cluster.address} {where}",
        *([f"price per device-hour: {price:g}"] if price else []),
        *(f"note: {warning}" for warning in cluster.warnings),
    ]


def _down_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "On a head: end the cluster. Commands and plain scripts are stopped; exact training saves itself and,"
        " like the queue, goes on at the next racimo up. Journal and outputs stay; nodes that joined wait for it."
        "\nOn a machine that joined: leave the cluster. What runs here moves to other nodes or is stopped."
    )
    parser.add_argument("--now", action="store_true", help="on a machine that joined: without waiting for its work")


def _down(args: argparse.Namespace) -> int:
    home = Home.default()
    if home.join_file.exists():
        from racimo.client.leaving import leave

        leave(home, now=args.now, say=talk)
        talk("this machine has left the cluster")
        _tell_of_unit(home)
        return 0
    from racimo.client.ending import down

    if down(home, say=talk):
        talk("the cluster has ended")
        _tell_of_unit(home)
    else:
        talk(f"no cluster was up in {home.root}")
    return 0


def _tell_of_unit(home: Home) -> None:
    from racimo.client.units import unit_folder, unit_name

    path = unit_folder() / unit_name(home)
    if path.exists():
        talk(
            f"its unit {path.name} stays, and starts the cluster again at the next boot: systemctl disable {path.name}"
        )


def _version(args: argparse.Namespace) -> int:
    from racimo.client.discovery import Finder
    from racimo.client.probing import probe

    endpoint = Finder(talk, may_start=False).find()
    cluster = probe(endpoint)
    versions = {"racimo": __version__, "protocol": PROTOCOL_VERSION}
    if args.output == "json":
        write_json({**versions, "cluster": cluster.version if cluster else None})
        return 0
    write(f"racimo {__version__}, protocol {PROTOCOL_VERSION}")
    write(f"cluster {cluster.version} at {endpoint.address}" if cluster and endpoint else "no cluster is running here")
    return 0


COMMANDS = {"up": (_up_arguments, _up), "down": (_down_arguments, _down), "version": (add_output, _version)}
