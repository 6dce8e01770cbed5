"""Object stores: what `s3://bucket/name` and `gs://bucket/name` mean, through fsspec, with retries and errors in words.

Endpoints and keys come from where the stores' own tools look for them: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID` and
their like, `GOOGLE_APPLICATION_CREDENTIALS`, machine roles.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mtjax.errors import UserError, first_line, require

LIBRARIES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}
"""By scheme: the library that speaks to it, and the extra that installs that."""
PAUSES = (1.0, 2.0, 4.0)
"""Seconds between attempts to reach a store; after the last one the run ends with a sentence."""

T = TypeVar("T")


def url_of(name: str | Path) -> str | None:
    """The address of something in an object store; None for what is on this machine.

    As a `Path`, an address has lost one of its slashes: `s3:/bucket/name`.
    """
    match = re.fullmatch(r"(s3|gs):/{1,2}([^/].*)", str(name))
    return f"{match[1]}://{match[2].rstrip('/')}" if match else None


def shown(path: Path) -> str:
    """A path as people know it: an address has both of its slashes."""
    return url_of(path) or str(path)


def filesystem(url: str) -> Any:
    """fsspec's file system for an address.

    Raises:
      UserError: its library is not installed; says which extra installs it.
    """
    scheme = url.partition(":")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
    else:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it logs, with stacks, it raises in the end
    require(*LIBRARIES[scheme])
    return require("fsspec", LIBRARIES[scheme][1]).filesystem(scheme, **options)


def attempt(what: str, action: Callable[[], T]) -> T:
    """What `action` returns, at the latest after some more attempts.

    Args:
      what: it does, for the message: "reading s3://bucket/name".
      action: may be done again.

    Raises:
      FileNotFoundError, FileExistsError: from the action, at once.
      UserError: no attempt reached the store, or it refuses.
    """
    for pause in (*PAUSES, None):
        try:
            return action()
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except PermissionError as e:
            raise UserError(f"{what}: the store refuses it: {first_line(e)}") from e
        except Exception as e:  # each store's library has errors of its own for a lost connection
            if pause is None:
                tries = len(PAUSES) + 1
                raise UserError(f"{what} failed {tries} times: {first_line(e)}; is the store reachable?") from e
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def read_bytes(path: str | Path) -> bytes:
    """What a file holds, in a store or on this machine.

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
    """Whether there is a file, in a store or on this machine.

    Raises:
      UserError: the store can't be reached.
    """
    url = url_of(path)
    if url is None:
        return Path(path).is_file()
    fs = filesystem(url)
    return attempt(f"reading {url}", lambda: fs.isfile(url))


def write_bytes(url: str, content: bytes) -> None:
    """Writes an object, which appears whole or not at all.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    attempt(f"writing {url}", lambda: fs.pipe_file(url, content))


def names_in(url: str) -> list[str]:
    """The names right below an address; none where there is nothing.

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
    """Gives all objects below an address another one: copies them, and then removes the old ones.

    Raises:
      UserError: the store can't be reached, or refuses.
    """
    fs = filesystem(url)
    start = fs._strip_protocol(url)
    for path in attempt(f"listing {url}", lambda: fs.find(url)):
        attempt(f"copying {path}", lambda p=path: fs.cp_file(p, new + p.removeprefix(start)))
    remove(url)


def key_value_store(path: str | Path) -> dict[str, Any]:
    """TensorStore's specification of a folder, in a store or on this machine."""
    url = url_of(path)
    if url is None:
        return {"driver": "file", "path": f"{Path(path).resolve()}/"}
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # Named where they are: TensorStore looks everywhere else first, and complains about each place on stderr.
    keys = {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else None
    optional = {"endpoint": endpoint, "aws_region": region if endpoint else None, "aws_credentials": keys}
    return {"driver": "s3", "bucket": bucket, "path": f"{name}/"} | {k: v for k, v in optional.items() if v}
