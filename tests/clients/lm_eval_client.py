"""Scores texts on a server with lm-eval: `lm_eval_client.py http://ADDRESS MODEL CONTEXT FOLDER < SCORES`.

FOLDER is empty. SCORES is a JSON list of `[text, log-probability of its tokens]`, one text a document of the task.
"""

import json
import math
import os
import pathlib
import sys

base, model, context, folder = sys.argv[1:]
folder = pathlib.Path(folder)
# No request goes to the hub, and no file stays in the folders of the user.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "hub"))

from lm_eval import evaluator  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

scores = json.load(sys.stdin)
data = folder / "texts.jsonl"
data.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in scores))
task = folder / "tasks" / "stories.yaml"
task.parent.mkdir()
task.write_text(f"""task: stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
metadata:
  version: 1
""")
# Prompts are ids, several in a request; the tokenizer is the server's.
lm = LocalCompletionsAPI(
    base_url=f"{base}/v1/completions",
    model=model,
    tokenizer_backend="auto",
    batch_size=2,
    max_length=int(context),
    max_retries=1,
    # The token that begins a text. lm-eval finds it by itself, unless its id is 0, as here.
    custom_prefix_token_id=0,
)
assert lm.tokenizer_backend == "remote", lm.tokenizer_backend
results = evaluator.simple_evaluate(
    model=lm,
    tasks=["stories"],
    task_manager=TaskManager(include_path=str(task.parent), include_defaults=False),
    bootstrap_iters=0,
)
samples = sorted(results["samples"]["stories"], key=lambda sample: sample["doc_id"])
assert len(samples) == len(scores), samples
for sample, (text, expected) in zip(samples, scores):
    found = sample["resps"][0][0]
    assert math.isclose(found, expected, rel_tol=1e-9), (text, found, expected)
count = sum(len(text.encode()) for text, _ in scores)
expected = -sum(score for _, score in scores) / count / math.log(2)
found = results["results"]["stories"]["bits_per_byte,none"]
assert math.isclose(found, expected, rel_tol=1e-9), (found, expected)
print(f"{len(scores)} texts have the same scores")
