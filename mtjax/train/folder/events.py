"""Writes TensorBoard event files: records of `Event` messages, encoded here.

The packages that write them import torch if it is installed, which takes seconds at every start. Sources: TensorFlow's
event.proto, summary.proto and lib/io/record_writer.h; for CRC-32C, RFC 3720, appendix B.4.
"""

import math
import struct

VERSION = b"brain.Event:2"


def _crc_of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC = [_crc_of_byte(value) for value in range(256)]


def _checksum(data: bytes) -> bytes:
    """Computes CRC-32C, masked as in record_writer.h."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, content: bytes) -> bytes:
    """Encodes a length-delimited protobuf field: text, or another message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def record(seconds: float, step: int, content: bytes) -> bytes:
    """Encodes an event as a record of a file; `seconds` since 1970, and step 0 is omitted."""
    # wall_time = 1, a fixed64 (0x09); step = 2, a varint (0x10).
    event = b"\x09" + struct.pack("<d", seconds) + (b"\x10" + _varint(step) if step else b"") + content
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


FIRST = _field(3, VERSION)
"""Content of a file's first event."""

START = _field(7, b"\x08\x01")
"""Content of an event that discards events of earlier files from its step on (SessionLog.START)."""


def scalar(name: str, value: float) -> bytes:
    """Encodes the content of an event with a float32 value; values out of range become infinite."""
    try:
        number = struct.pack("<f", value)
    except OverflowError:
        number = struct.pack("<f", math.copysign(math.inf, value))
    # Event.summary = 5, Summary.value = 1; in the value tag = 1 and simple_value = 2, a fixed32 (0x15).
    return _field(5, _field(1, _field(1, name.encode()) + b"\x15" + number))
