"""A real S3 server on this machine, moto's, for tests of what lies in object stores."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A server with an empty bucket called `bucket`, found by its environment variables; its address."""
    for library in ("moto.server", "s3fs"):
        pytest.importorskip(library, reason="needs the extra store-tests: pip install '.[store-tests]'")
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    with mock.patch.dict(os.environ, {**KEYS, "AWS_ENDPOINT_URL": address}):
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield address
    server.stop()
