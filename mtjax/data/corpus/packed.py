"""Opens text files whatever they are packed in: gzip, zstd, bz2 and xz are recognized by content, not by name.

UTF-16 and UTF-32 with a byte order mark become UTF-8. Archives and formats that can't be read are refused by name, with
what to do about them.
"""

import bz2
import codecs
import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from mtjax.data.progress import say
from mtjax.errors import UserError, require

INPUT_BYTES = 1 << 16
OUTPUT_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
"""Bytes at the beginning of a file by which its format is recognized."""
LONGEST_MAGIC = 6
ZSTD_MAGIC = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 | kind]) + b"\x2a\x4d\x18" for kind in range(16)))
"""Of frames with data, and of the skippable ones that pzstd and the seekable format add."""
ZSTD_WINDOW = 1 << 31
"""The largest window that `zstd --long=31` writes; the library's default refuses more than 128 MiB."""
TAR_MAGIC_AT = 257
REFUSED = {
    b"PK\x03\x04": ("a zip archive", "extract it with unzip, and give the files in it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "extract it with 7z x, and give the files in it"),
    b"Rar!\x1a\x07": ("a RAR archive", "extract it with unrar x, and give the files in it"),
    b"\x04\x22\x4d\x18": ("compressed with lz4", "decompress it with lz4 -d"),
    b"\x1f\x9d": ("compressed with compress", "decompress it with gzip -d"),
    b"%PDF": ("a PDF", "extract its text, for example with pdftotext"),
    b"Obj\x01": ("an Avro file", "convert it to Parquet or JSON lines"),
    b"ORC": ("an ORC file", "convert it to Parquet or JSON lines"),
}
"""First bytes of a file -> what it is, and what to do."""
MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""


class Compression(NamedTuple):
    """A format of compressed files.

    Attributes:
      name: for messages.
      matches: returns whether a file begins with it.
      decoder: creates a decompressor of one member (gzip), frame (zstd) or stream (bz2, xz).
    """

    name: str
    matches: Callable[[bytes], bool]
    decoder: Callable[[], Any]


def _zstd() -> Any:
    return require("zstandard", "data").ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()


COMPRESSIONS = (
    Compression("gzip", lambda head: head.startswith(b"\x1f\x8b"), lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)),
    Compression("zstd", lambda head: head[:4] in ZSTD_MAGIC, _zstd),
    # A text may begin with `BZh`, too. In bzip2 a level and the magic number of a block, or of the end, follow.
    Compression("bz2", lambda head: head[:3] == b"BZh" and head[4:6] in (b"1A", b"\x17r"), bz2.BZ2Decompressor),
    Compression("xz", lambda head: head.startswith(b"\xfd7zXZ\x00"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
)
SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".bzip2", ".xz")
"""Endings of names that say nothing of what is inside the compressed file."""


class OpenFile(NamedTuple):
    """An open file.

    Attributes:
      raw: the file as it is stored.
      content: what is in it: decompressed, and in UTF-8 where it begins with a byte order mark of UTF-16 or UTF-32.
      head: the beginning of the content.
    """

    raw: IO[bytes]
    content: IO[bytes]
    head: bytes


@contextlib.contextmanager
def open_packed(path: str) -> Iterator[OpenFile]:
    """Opens a file, local or at a URL.

    Raises:
      UserError: its format is one that can't be read; says what to do.
      OSError: it can't be opened.
    """
    with _open_raw(path) as raw:
        content = raw
        # A loop: a file may be compressed twice, by a download and by its owner.
        while compression := next((c for c in COMPRESSIONS if c.matches(_peek(content))), None):
            content = _buffered(_Decompressed(path, content, compression))
        head = _peek(content)
        _refuse(path, head)
        if content is raw and head and path.lower().endswith(SUFFIXES):
            say(f"note    {path} is not compressed, and is read as it is")
        if encoding := next((name for mark, name in MARKS if head.startswith(mark)), None):
            content = _buffered(_Recoded(path, content, encoding))
            head = _peek(content)
        yield OpenFile(raw, content, head)


def without_suffixes(path: str) -> str:
    """Returns the name of a file without folder and endings of compression, in lower case."""
    name = path.rpartition("/")[2].lower()
    while suffix := next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None):
        name = name.removesuffix(suffix)
    return name


def _open_raw(path: str) -> IO[bytes]:
    if "://" not in path:
        return cast("IO[bytes]", io.BufferedReader(io.FileIO(Path(path)), HEAD_BYTES))
    remote = require("fsspec", "data").open(path, "rb").open()
    return remote if hasattr(remote, "peek") else _buffered(remote)


def _buffered(file: Any) -> IO[bytes]:
    return cast("IO[bytes]", io.BufferedReader(file, OUTPUT_BYTES))


def _peek(file: Any) -> bytes:
    return file.peek(HEAD_BYTES)[:HEAD_BYTES]


def _refuse(path: str, head: bytes) -> None:
    for magic, (what, remedy) in REFUSED.items():
        if head.startswith(magic):
            raise UserError(f"{path} is {what}, which can't be read: {remedy}")
    if head[TAR_MAGIC_AT : TAR_MAGIC_AT + 5] == b"ustar":
        raise UserError(f"{path} is a tar archive, which can't be read: extract it with tar -xf, and give its files")


class _Decompressed(io.RawIOBase):
    """The content of a compressed file of one or more members, such as `cat a.gz b.gz` makes."""

    def __init__(self, path: str, raw: IO[bytes], compression: Compression) -> None:
        self._path, self._raw, self._compression = path, raw, compression
        self._decoder = compression.decoder()
        self._input = self._output = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output and not self._ended:
            if self._decoder.eof:
                self._start_next_member()
            else:
                self._decompress()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decompress(self) -> None:
        # What was left after a member comes before the rest of the file.
        data = self._input or self._raw.read(INPUT_BYTES)
        self._input = b""
        if not data:
            raise UserError(f"{self._path} is corrupted: its {self._compression.name} data end in the middle")
        try:
            self._output = self._decoder.decompress(data)
        except Exception as e:  # each library has its own
            raise UserError(f"{self._path} is corrupted: its {self._compression.name} data are invalid ({e})") from e

    def _start_next_member(self) -> None:
        """Goes on after the end of a member."""
        # Zeros pad a file to the blocks of a tape, or to the parts of an upload.
        left = self._decoder.unused_data.lstrip(b"\0")
        # A magic number may be cut by the border of a block.
        while len(left) < LONGEST_MAGIC and (more := self._raw.read(INPUT_BYTES)):
            left = (left + more).lstrip(b"\0")
        if left and self._compression.matches(left):
            self._decoder, self._input = self._compression.decoder(), left
            return
        self._ended = True
        if left:
            size = len(left) + sum(len(data) for data in iter(lambda: self._raw.read(OUTPUT_BYTES), b""))
            say(f"note    {self._path} has {size:,} bytes after the end of its {self._compression.name} data: ignored")


class _Recoded(io.RawIOBase):
    """Text of another encoding as UTF-8."""

    def __init__(self, path: str, file: IO[bytes], encoding: str) -> None:
        self._path, self._file, self._encoding = path, file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._output, self._ended = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output and not self._ended:
            data = self._file.read(INPUT_BYTES)
            self._ended = not data
            try:
                self._output = self._decoder.decode(data, final=self._ended).encode()
            except UnicodeError as e:
                raise UserError(
                    f"{self._path} begins with the byte order mark of {self._encoding}, and is not {self._encoding} "
                    f"text: {e}"
                ) from e
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
