"""Records of the journal as bytes: JSON, so that a person can read them with nothing but sqlite3."""

import msgspec

from racimo.state.events import Record

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decode_record(content: bytes) -> Record:
    """`ValueError` if it is not a record that this version knows."""
    return _DECODER.decode(content)


def run_of(record: Record) -> str:
    """The run that a record is about, or ""."""
    run = getattr(record.event, "run", "")
    assert isinstance(run, str)
    return run
