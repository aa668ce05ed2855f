"""Loads a server with llama-benchy: `llama_benchy_client.py http://ADDRESS MODEL TOKENIZER BOOK FOLDER`.

TOKENIZER is the folder of the model's tokenizer, BOOK a text for prompts, FOLDER is empty.
"""

import functools
import http.server
import json
import os
import pathlib
import sys
import threading

base, model, tokenizer, book, folder = sys.argv[1:]
book, folder = pathlib.Path(book), pathlib.Path(folder)
# It stores the text that it downloads below the home folder. No request goes to the hub.
os.environ.update(HOME=str(folder), HF_HUB_OFFLINE="1")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


texts = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=book.parent))
threading.Thread(target=texts.serve_forever, daemon=True).start()

from llama_benchy.__main__ import main  # noqa: E402

progress = folder / "progress.jsonl"
options = {
    "base-url": f"{base}/v1",
    "model": model,
    "tokenizer": tokenizer,
    "book-url": f"http://127.0.0.1:{texts.server_port}/{book.name}",
    "pp": "64",
    "tg": "32",
    "runs": "2",
    "save-result": str(folder / "result.md"),
    "emit-progress": str(progress),
    # It counts no token without a visible text. Drawn by chance, one request of 570 has a special token among its 32.
    "extra-body": "temperature=0",
}
sys.argv = ["llama-benchy", *(word for name, value in options.items() for word in (f"--{name}", value))]
# The small model does not know the capital of France, for which the test of coherence asks.
sys.argv += ["--concurrency", "1", "4", "--exact-tg", "--skip-coherence", "--exit-on-first-fail"]
main()

events = [json.loads(line) for line in progress.read_text().splitlines()]
ends = [event for event in events if event["type"] == "request_end"]
# Two runs of one request, and two of four at once. It counts tokens by the ids of the stream.
assert len(ends) == 10, ends
for end in ends:
    assert end["total_tokens"] == 32 and not end["error"], end
assert sum(event["count"] for event in events if event["type"] == "tokens") == 320
