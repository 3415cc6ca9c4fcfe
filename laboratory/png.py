"""A picture of text and lines in 256 colours, which is half as large: Chromium writes millions."""

from __future__ import annotations

import struct
import zlib
from collections import Counter

COLOURS = 256
PIXEL = 3  # bytes: red, green and blue, as Chromium writes them


def in_few_colours(png: bytes) -> bytes:
    """The same PNG with its most frequent colours, and each other one as the nearest of them."""
    chunks = dict[bytes, bytes]()
    at = 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        chunks[kind] = chunks.get(kind, b"") + png[at + 8 : at + 8 + size]
        at += size + 12
    width, height, *kind_of_png = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if kind_of_png != [8, 2, 0, 0, 0]:
        raise ValueError("this is no plain PNG of red, green and blue")
    rows = [
        [row[place : place + PIXEL] for place in range(0, len(row), PIXEL)]
        for row in _rows(zlib.decompress(chunks[b"IDAT"]), width * PIXEL)
    ]
    counts = Counter(colour for row in rows for colour in row)
    kept = [colour for colour, _ in counts.most_common(COLOURS)]
    places = {colour: min(range(len(kept)), key=lambda n: _apart(kept[n], colour)) for colour in counts}
    lines = b"".join(b"\0" + bytes(places[colour] for colour in row) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", b"".join(kept)), (b"IDAT", zlib.compress(lines, 9)))
    return png[:8] + b"".join(_chunk(*part) for part in (*parts, (b"IEND", b"")))


def _rows(data: bytes, size: int) -> list[bytes]:
    """The pixels of each row; a PNG has their differences to those on the left and above."""
    rows, above = [], bytearray(size)
    for start in range(0, len(data), size + 1):
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + size])
        for place in range(size if kind else 0):
            left = row[place - PIXEL] if place >= PIXEL else 0
            corner = above[place - PIXEL] if place >= PIXEL else 0
            over = above[place]
            guesses = (
                0,
                left,
                over,
                (left + over) // 2,
                _paeth(left, over, corner) if kind == 4 else 0,
            )
            row[place] = (row[place] + guesses[kind]) & 255
        rows.append(bytes(row))
        above = row
    return rows


def _paeth(left: int, over: int, corner: int) -> int:
    return min((left, over, corner), key=lambda value: abs(left + over - corner - value))


def _apart(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
