"""This very Racimo as a wheel, made from its installed files: what `racimo add` brings along to another machine."""

import base64
import hashlib
import io
import re
import zipfile
from importlib import metadata
from pathlib import Path

import msgspec

import racimo
from racimo.act.versions import minor_of, own_versions
from racimo.spec.errors import RacimoError

LEFT_OUT = ("__pycache__",)
_WHEEL = "Wheel-Version: 1.0\nGenerator: racimo\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The same files make the same bytes, so that a host that has them needs nothing."""


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """`id`: SHA-256 of the wheel. `pins`: requirements beside its own, so that the numbers agree there and here."""

    file_name: str
    content: bytes
    id: str
    pins: tuple[str, ...]


def make_parcel() -> Parcel:
    """`RacimoError` internal where this Racimo was never installed, so that nobody knows what it requires."""
    try:
        distribution = metadata.distribution("racimo")
    except metadata.PackageNotFoundError:
        raise RacimoError("internal", "this racimo is not installed", "pip install .   # in its folder") from None
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    package = Path(racimo.__file__).parent
    files = {
        str(path.relative_to(package.parent)): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not set(LEFT_OUT) & set(path.parts)
    }
    # A version of its own for each content, so that pip replaces one by another and nothing else.
    contents = hashlib.sha256(b"".join(_digest(content).encode() for content in files.values())).hexdigest()
    version = f"{distribution.version.partition('+')[0]}+{contents[:8]}"
    info = f"racimo-{version}.dist-info"
    files[f"{info}/METADATA"] = re.sub(r"(?m)^Version: .*$", f"Version: {version}", about, count=1).encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/entry_points.txt"] = (distribution.read_text("entry_points.txt") or "").encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode() + b"\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    content = packed.getvalue()
    return Parcel(
        file_name=f"racimo-{version}-py3-none-any.whl",
        content=content,
        id=hashlib.sha256(content).hexdigest(),
        pins=tuple(f"torch=={minor_of(found)}.*" for name, found in own_versions().items() if name == "torch"),
    )


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
