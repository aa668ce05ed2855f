"""Starts workers of a search on a cluster of Ray. The first line of stdin says how many of which command; workers end with stdin."""

import json
import os
import subprocess
import sys
import time

try:
    import ray
except ImportError as missing:
    sys.exit(f"the Python package `ray` cannot be imported: {missing}")

asked = json.loads(sys.stdin.readline())
ray.init(address=asked["address"] or os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level="ERROR")


# A worker whose node is lost is started again on another one.
@ray.remote(num_cpus=1, num_gpus=asked["gpus"], max_retries=-1, retry_exceptions=True)
def worker(command, variables):
    job = ray.get_runtime_context().get_task_id()
    environment = {**os.environ, **variables, "MONOBLOC_FLEET_JOB": job}
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if ended.returncode:
        time.sleep(5)  # Not again at once, if it fails for a reason that stays.
        raise RuntimeError(f"{command[0]} ended with {ended.returncode}")


running = [worker.remote(asked["command"], asked["variables"]) for _ in range(asked["workers"])]
sys.stdin.read()
for task in running:
    ray.cancel(task, force=True)
