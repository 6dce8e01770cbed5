"""Data parallel replicas behind one address."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.asking import ask, send
from tests.serve.conftest import Live, served

pytestmark = pytest.mark.long


def text_of(live: Live, number: int) -> Any:
    fields = {"prompt": f"the cat {number}", "max_tokens": 12, "seed": number, "temperature": number % 2}
    status, answer = ask(live, "POST", "/v1/completions", fields)
    assert status == 200
    return answer["choices"]


def test_two_replicas_share_the_load_and_generate_the_same_texts(live, folder) -> None:
    alone = [text_of(live, number) for number in range(12)]
    with served(folder, 2, "2x2") as two:
        with ThreadPoolExecutor(12) as clients:
            together = list(clients.map(lambda number: text_of(two, number), range(12)))
        page = send(two.address, "GET", "/metrics").text
    assert together == alone
    assert "mtjax_slots 4.0" in page
    written = [float(n) for n in re.findall(r'mtjax_replica_generated_tokens_total\{replica="\d"\} (\S+)', page)]
    (total,) = re.findall(r"^mtjax_generated_tokens_total (\S+)", page, re.MULTILINE)
    assert len(written) == 2 and sum(written) == float(total)
    assert min(written) >= 3 * 12
