"""Loads a server for a minute and compares every stream with the same request alone; prints figures.

    monobloc serve MANIFEST --max-batch 8 &
    python3 tests/bench/serve.py http://127.0.0.1:8000 --streams 200 --seconds 60 --pid $!

Needs Python 3.8 and nothing else. Exits with 1 if a stream differs from its request alone.
"""

import argparse
import http.client
import json
import pathlib
import threading
import time
import urllib.parse

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--streams", type=int, default=200, help="requests at a time")
parser.add_argument("--seconds", type=float, default=60)
parser.add_argument("--requests", type=int, default=100, help="different requests")
parser.add_argument("--tokens", type=int, default=32, help="tokens of the longest request")
parser.add_argument("--same", action="store_true", help="every request has that many tokens, and ends with none")
parser.add_argument("--settings", type=json.loads, default={}, help="fields of every request, as JSON")
parser.add_argument("--pid", type=int, help="process of the server, for its memory and processor time")
asked = parser.parse_args()
address = urllib.parse.urlparse(asked.url).netloc

PROMPTS = ["Once upon a time", "The dog", "Lily saw a big red ball in the park and she", "One day, a boy named Tim", "A"]


def body(at):
    return {
        "prompt": f"{PROMPTS[at % len(PROMPTS)] * (1 + at % 4)} {at}",
        "max_tokens": asked.tokens if asked.same else 1 + at % asked.tokens,
        "temperature": 0 if at % 3 == 0 else 0.9,
        "seed": at,
        "ignore_eos": asked.same or at % 2 == 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked.settings,
    }


def ask(at):
    """The text of a request, its tokens, and the seconds to the first one."""
    began, first, text, tokens = time.monotonic(), None, [], 0
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body(at)), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event["choices"]:
            first = first or time.monotonic() - began
            text.append(event["choices"][0]["text"])
        else:
            tokens = event["usage"]["completion_tokens"]
    connection.close()
    return "".join(text), tokens, first


def used():
    """Resident MiB and processor seconds of the server and its children; the seconds without those of the engine's threads."""
    if not asked.pid:
        return None
    pids, engine = [asked.pid], 0
    for task in pathlib.Path(f"/proc/{asked.pid}/task").iterdir():
        pids += [int(pid) for pid in (task / "children").read_text().split()]
        stat = (task / "stat").read_text().rsplit(")", 1)[1].split()
        # Threads that the engine starts have its name.
        if (task / "comm").read_text().strip() == "engine":
            engine += (int(stat[11]) + int(stat[12])) / 100
    mib, seconds = {}, {}
    for pid in pids:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        mib[pid] = int(stat[21]) * 4096 / 2**20
        seconds[pid] = (int(stat[11]) + int(stat[12])) / 100
    return sum(mib.values()), sum(seconds.values()), sum(seconds.values()) - engine


alone = {at: ask(at)[:2] for at in range(asked.requests)}
before, began, lock = used(), time.monotonic(), threading.Lock()
end, done, tokens, wrong, firsts, turn = began + asked.seconds, 0, 0, [], [], iter(range(10**9))


def client():
    global done, tokens
    while time.monotonic() < end:
        with lock:
            at = next(turn) % asked.requests
        text, count, first = ask(at)
        with lock:
            done, tokens = done + 1, tokens + count
            firsts.append(first)
            if (text, count) != alone[at]:
                wrong.append(at)


threads = [threading.Thread(target=client) for _ in range(asked.streams)]
[thread.start() for thread in threads]
peak = before and before[0]
while any(thread.is_alive() for thread in threads):
    time.sleep(0.5)
    peak = peak and max(peak, used()[0])
seconds, after = time.monotonic() - began, used()
firsts = sorted(first for first in firsts if first is not None)
report = {
    "streams": asked.streams,
    "seconds": round(seconds, 1),
    "requests": done,
    "tokens": tokens,
    "tokens_per_s": round(tokens / seconds, 1),
    "first_token_s_p50": round(firsts[len(firsts) // 2], 3),
    "wrong": len(wrong),
}
if before:
    report["mib_before"], report["mib_peak"] = round(before[0]), round(peak)
    report["cpu_us_per_token"] = round((after[1] - before[1]) / tokens * 1e6)
    report["cpu_us_per_token_without_engine"] = round((after[2] - before[2]) / tokens * 1e6)
print(json.dumps(report))
raise SystemExit(bool(wrong))
