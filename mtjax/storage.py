"""Object stores (`s3://bucket/name`, `gs://bucket/name`) through fsspec, with retries and readable errors; and text
files that are written as a whole.

Endpoints and credentials come from the stores' standard sources: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
`STORAGE_EMULATOR_HOST`, `GOOGLE_APPLICATION_CREDENTIALS`, machine roles, and so on.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mtjax.errors import UserError, first_line, require

LIBRARIES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}
"""Scheme -> the fsspec library, and the extra that installs it."""
PATIENCE = 30.0
"""Seconds after which no more retries start, and the store is reported as unreachable."""
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between retries."""
SILENCE = 10
"""Timeout in seconds of a request without a connection or a byte; a block may take twice that."""
RETRIES = 5
"""Retries within TensorStore, 23 seconds in all; its default of 32 would take a quarter of an hour."""
TENSORSTORE = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(SILENCE),
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(SILENCE),
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
"""Environment variables with the same timeouts for TensorStore."""
BLOCK = 8 << 20
"""Bytes per request when a file is copied."""

T = TypeVar("T")


def check_out(out: Path | None, option: str = "--out") -> None:
    """Checks that a file on a disk can be written, before its content is computed.

    Raises:
      UserError: it is a folder, or its folder does not exist.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{option} {out} is a folder: name a file")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"{option} {out} can't be written: {out.parent} does not exist")


def write_whole(option: str, path: Path, text: str) -> None:
    """Writes a text file on a disk as a whole: a reader sees the old file or the new one.

    Args:
      option: that names the file, for the error.
      path: the file.
      text: its content, in UTF-8.

    Raises:
      UserError: the file can't be written.
    """
    try:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as e:
        raise UserError(f"{option} {path} can't be written: {e.strerror or first_line(e)}") from e


def url_of(name: str | Path) -> str | None:
    """Returns the address of a path in an object store; None for a path on this machine.

    As a `Path`, an address has lost one of its slashes: `s3:/bucket/name`.
    """
    match = re.fullmatch(r"(s3|gs):/{1,2}([^/].*)", str(name))
    return f"{match[1]}://{match[2].rstrip('/')}" if match else None


def shown(path: Path) -> str:
    """Formats a path for messages: an address has both of its slashes."""
    return url_of(path) or str(path)


def filesystem(url: str) -> Any:
    """Returns fsspec's file system for an address.

    Raises:
      UserError: its library is not installed; names the extra that installs it.
    """
    scheme = url.partition(":")[0]
    library, extra = LIBRARIES[scheme]
    require(library, extra)
    if scheme == "s3":
        config = {"connect_timeout": SILENCE, "read_timeout": 2 * SILENCE, "retries": {"max_attempts": 0}}
        fs = require("fsspec", extra).filesystem("s3", use_listings_cache=False, config_kwargs=config)
        # `attempt` retries, with a limit in seconds; the library's own retries would multiply them.
        fs.retries = 2
        return fs
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it also raises the errors that it logs with stacks
    timeout = require("aiohttp", extra).ClientTimeout(total=2 * SILENCE, sock_connect=SILENCE)
    # fsspec's registered class requests the kind of the bucket from another service before each request.
    return require("gcsfs.core", extra).GCSFileSystem(use_listings_cache=False, requests_timeout=timeout)


def attempt(what: str, action: Callable[[], T]) -> T:
    """Runs `action`, and retries it if the store can't be reached.

    Args:
      what: description of the action for messages: "reading s3://bucket/name".
      action: must be safe to repeat.

    Raises:
      FileNotFoundError, FileExistsError: from the action, at once.
      UserError: the store can't be reached within `PATIENCE`, or denies access.
    """
    begun = time.monotonic()
    for pause in (*PAUSES, None):
        try:
            return action()
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except Exception as e:  # each store's library has different exceptions for a lost connection
            if _refuses(e):
                raise UserError(f"{what}: the store refuses it: {first_line(e)}") from e
            waited = time.monotonic() - begun
            if pause is None or waited + pause > PATIENCE:
                why = first_line(e) if str(e) else "no answer"
                raise UserError(f"{what} failed for {waited:.0f} s: {why}; is the store reachable?") from e
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _refuses(error: Exception) -> bool:
    """Returns whether a store denies access, by the errors of s3fs, gcsfs and TensorStore."""
    is_refused = str(error).startswith(("Forbidden", "PERMISSION_DENIED", "UNAUTHENTICATED"))
    return is_refused or isinstance(error, PermissionError) or str(getattr(error, "code", "")) in ("401", "403")


def read_bytes(path: str | Path) -> bytes:
    """Reads a file, in an object store or on this machine.

    Raises:
      OSError: it is not there or can't be read.
      UserError: the store can't be reached.
    """
    url = url_of(path)
    if url is None:
        return Path(path).read_bytes()
    fs = filesystem(url)
    return attempt(f"reading {url}", lambda: fs.cat_file(url))


def is_file(path: str | Path) -> bool:
    """Returns whether a file exists, in an object store or on this machine.

    Raises:
      UserError: the store can't be reached.
    """
    url = url_of(path)
    if url is None:
        return Path(path).is_file()
    fs = filesystem(url)
    try:  # fsspec's `isfile` treats any exception as False
        return attempt(f"reading {url}", lambda: fs.info(url))["type"] == "file"
    except FileNotFoundError:
        return False


def write_bytes(url: str, content: bytes) -> None:
    """Writes an object atomically.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    attempt(f"writing {url}", lambda: fs.pipe_file(url, content, chunksize=BLOCK))


def blocks_of(url: str, size: int) -> Iterator[bytes]:
    """Yields the blocks of an object of `size` bytes.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        yield attempt(f"reading {url}", lambda b=begin, e=end: fs.cat_file(url, start=b, end=e))


def files_below(url: str) -> dict[str, int]:
    """Returns the objects at or below an address, with their sizes in bytes.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    infos = attempt(f"listing {url}", lambda: fs.find(url, detail=True))
    scheme = url.partition(":")[0]
    return {f"{scheme}://{path}": info["size"] for path, info in infos.items() if info["type"] == "file"}


def names_in(url: str) -> list[str]:
    """Lists the names directly below an address; empty if it does not exist.

    Raises:
      UserError: the store can't be reached.
    """
    fs = filesystem(url)
    try:
        found = attempt(f"listing {url}", lambda: fs.ls(url, detail=False))
    except FileNotFoundError:
        return []
    return sorted(path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != url.partition("//")[2])


def remove(url: str) -> None:
    """Removes everything below an address.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    try:
        attempt(f"removing {url}", lambda: fs.rm(url, recursive=True))
    except FileNotFoundError:
        return


def rename(url: str, new: str) -> None:
    """Renames all objects below an address: copies them, and then removes the old ones.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    start = fs._strip_protocol(url)
    # Object stores have no rename. The old objects go last, so that an interruption leaves copies rather than nothing.
    for path in attempt(f"listing {url}", lambda: fs.find(url)):
        attempt(f"copying {path}", lambda p=path: fs.cp_file(p, new + p.removeprefix(start)))
    remove(url)


def key_value_store(path: str | Path) -> dict[str, Any]:
    """Returns TensorStore's kvstore spec of a folder, in an object store or on this machine."""
    url = url_of(path)
    if url is None:
        return {"driver": "file", "path": f"{Path(path).resolve()}/"}
    scheme, _, path_in_bucket = url.partition("://")
    bucket, _, name = path_in_bucket.partition("/")
    retries = {"max_retries": RETRIES, "initial_delay": "1s", "max_delay": "8s"}
    for variable, value in TENSORSTORE.items():
        os.environ.setdefault(variable, value)
    if scheme == "gs":
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = emulator if "://" in emulator else f"http://{emulator}"
        return {"driver": "gcs", "bucket": bucket, "path": f"{name}/", "gcs_request_retries": retries}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # Set explicitly: TensorStore tries all other sources of credentials first, and logs an error on stderr for each.
    keys = {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else None
    optional = {"endpoint": endpoint, "aws_region": region if endpoint else None, "aws_credentials": keys}
    spec = {"driver": "s3", "bucket": bucket, "path": f"{name}/", "s3_request_retries": retries}
    return spec | {k: v for k, v in optional.items() if v}
