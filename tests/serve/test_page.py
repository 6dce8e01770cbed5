"""The web page at `/`, in a real browser."""

import re

import pytest

from tests.serve.asking import ask
from tests.serve.browser import find_browser, open_page
from tests.serve.conftest import KEY


def test_page_loads_no_external_resources(live) -> None:
    status, text = ask(live, "GET", "/", headers={"Authorization": ""})
    assert status == 200 and not re.search(r"https?://|src=|@import", text)


@pytest.mark.long
@pytest.mark.skipif(find_browser() is None, reason="needs a browser: apt install chromium-headless-shell, or CHROMIUM")
def test_page_in_a_browser(live) -> None:
    browser = find_browser()
    assert browser is not None
    with open_page(browser) as page:
        page.call("Page.navigate", url=live.address)
        page.until("document.readyState == 'complete' && document.getElementById('state').className == 'error'")
        assert "the API key is missing" in page.value("document.getElementById('state').textContent")
        page.type_into("key", KEY)
        page.type_into("prompt", "the cat")
        assert page.until("document.getElementById('model').textContent != '...' && document.title") == "mtjax"
        assert page.value("document.getElementById('model').textContent") == "tiny"
        page.type_into("tokens", "9")
        page.type_into("temperature", "0")
        page.click("send")
        state = page.until("!document.getElementById('send').disabled && document.getElementById('state').textContent")
        body = {"prompt": "the cat", "max_tokens": 9, "temperature": 0}
        _, same = ask(live, "POST", "/v1/completions", body)
        assert page.value("document.getElementById('text').textContent") == same["choices"][0]["text"]
        assert state.startswith("length: 9 tokens in ")

        page.click("chat")
        page.click("send")
        page.until("!document.getElementById('send').disabled")
        body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 9, "temperature": 0}
        _, same = ask(live, "POST", "/v1/chat/completions", body)
        assert page.value("document.getElementById('text').textContent") == same["choices"][0]["message"]["content"]

        page.type_into("tokens", "1000")
        page.click("send")
        page.until("!document.getElementById('send').disabled")
        assert "max_tokens is 1000" in page.value("document.getElementById('state').textContent")
