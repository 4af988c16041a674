"""The front end in a browser, fed by a run that never was: js/demo/index.html says what can be asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def demonstration() -> Iterator[str]:
    """Serves it as long as this lasts; its address, to which what is asked for is added: `&ranks=4&dark`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(ROOT))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/js/demo/index.html?still"
        finally:
            server.shutdown()
            thread.join()
