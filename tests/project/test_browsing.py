"""What a page complains of when a test looks at it."""

import http.server
import threading

import pytest
from support.browsing import opened
from support.servers import free_port

ASKS = "address => fetch(address, {signal: AbortSignal.timeout(300)}).catch(() => 'no answer')"


class Slow(http.server.BaseHTTPRequestHandler):
    """Answers its page at once, and nothing else before the test has ended."""

    def do_GET(self):
        if self.path != "/":
            self.server.ended.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *said):
        """Says nothing."""


@pytest.fixture
def slow():
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    served.ended = threading.Event()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}/"
    served.ended.set()
    served.shutdown()
    served.server_close()


def test_a_request_that_its_page_drops_is_no_complaint(slow, browser):
    with opened(browser, slow) as (page, complaints):
        assert page.evaluate(ASKS, f"{slow}late") == "no answer"
        page.wait_for_timeout(200)
        assert [said for said in complaints if "favicon" not in said] == []


def test_a_request_that_nobody_answers_is_one(slow, browser):
    nobody = f"http://127.0.0.1:{free_port()}/"
    with opened(browser, slow) as (page, complaints):
        assert page.evaluate(ASKS, nobody) == "no answer"
        page.wait_for_timeout(200)
        assert any(said.startswith(f"failed: {nobody}") for said in complaints)
