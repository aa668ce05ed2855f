"""Tests the package as users call it, on the `cpu` target with the small trained model of the fixtures. Needs no network."""

import ast
import gc
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import monobloc

ROOT = pathlib.Path(__file__).parents[3]
FIXTURE = ROOT / "tests/fixtures/tinystories-llama"
GOLDENS = json.loads((FIXTURE / "goldens.json").read_text())
# Prompts that are plain text and fit into the context.
PROMPTS = [prompt for prompt in GOLDENS["prompts"] if not prompt["messages"] and prompt["n_ids"] < 400]
MANIFEST = f"""
[model]
source = "path:{FIXTURE}"
[precision]
weights = "fp32"
[decode]
context_max = 512
[[target]]
record = "cpu"
"""
CHAT = [{"role": "user", "content": "Tell me a story about Zoe."}]
ONCE = "Once upon a time, there was a little girl named Lily. She liked to play"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "tiny.toml").write_text(MANIFEST)
    return folder


@pytest.fixture(scope="session")
def model(place):
    return monobloc.load(place / "tiny.toml", cache=place / "cache")


@pytest.fixture(scope="session")
def program(place):
    """Runs the program `monobloc` with the cache of the package; returns its stdout."""

    def run(*arguments):
        command = [os.environ["MONOBLOC_BINARY"], "--cache", place / "cache", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    return run


@pytest.fixture(scope="session")
def export(place, program):
    program("export", place / "tiny.toml", "--out", place / "export")
    return place / "export"


def ids_of(model, count):
    return (model.encode(ONCE) * 20)[:count]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["name"])
def test_greedy_tokens_are_those_of_transformers(model, prompt):
    assert model.encode(prompt["text"]) == prompt["ids"]
    stream = model.stream(prompt["ids"], max_tokens=len(prompt["greedy_ids"]), ignore_eos=True)
    pieces = list(stream)
    assert [piece.id for piece in pieces if piece.id is not None] == prompt["greedy_ids"]
    assert stream.stop == "length"
    before = model.decode(prompt["ids"], skip_special=False)
    whole = model.decode(prompt["ids"] + prompt["greedy_ids"], skip_special=False)
    assert "".join(piece.text for piece in pieces) == whole[len(before) :]


@pytest.mark.parametrize(
    "settings, options",
    [
        ({}, []),
        (
            {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1},
            ["--temperature=0.9", "--top-k=40", "--top-p=0.95", "--seed=7", "--repetition-penalty=1.1"],
        ),
    ],
    ids=["greedy", "sampled"],
)
def test_generate_is_that_of_the_program(model, place, program, settings, options):
    text = model.generate("Once upon a time", max_tokens=24, **settings)
    said = program("generate", place / "tiny.toml", "--prompt", "Once upon a time", "--max-tokens", "24", *options)
    assert text + "\n" == said and text.strip()


def test_logits_are_those_of_the_program(model, place, program):
    ids = ids_of(model, 20)
    file = place / "logits.safetensors"
    program("logits", place / "tiny.toml", "--ids", ",".join(map(str, ids)), "--out", file)
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    expected = np.frombuffer(data, dtype=np.float32, offset=header).reshape(20, model.vocab)
    logits = model.logits(ids)
    assert logits.dtype == np.float32 and logits.flags.writeable
    assert np.array_equal(logits, expected)
    assert np.array_equal(model.logits(np.array(ids[:2])), expected[:2])
    assert next(model.stream(ids, max_tokens=1)).id == expected[-1].argmax()


def test_facts(model):
    assert (model.name, model.target, model.context_max) == ("tiny", "cpu", 512)
    assert (model.rows_max, model.sequences_max, model.has_tokenizer) == (16, 8, True)
    assert model.bos == 0 and 1 in model.eos and model.vocab > 500
    assert repr(model) == "<monobloc.Model 'tiny' on 'cpu'>"
    assert monobloc.__version__.count(".") == 2


def test_generate_returns_the_text_of_the_stream(model):
    text = model.generate("Once upon a time", max_tokens=20)
    assert text == "".join(piece.text for piece in model.stream("Once upon a time", max_tokens=20))
    assert text == model.generate(model.encode("Once upon a time"), max_tokens=20) != ""
    # A stop text may span tokens, and is not part of the generated text.
    stop = text[5:9]
    stream = model.stream("Once upon a time", max_tokens=20, stop=[stop])
    assert "".join(piece.text for piece in stream) == text[: text.index(stop)]
    assert stream.stop == "stop"
    assert model.generate("Once upon a time", max_tokens=20, stop=stop) == text[: text.index(stop)]
    ids = [piece.id for piece in model.stream("Once upon a time", max_tokens=20) if piece.id is not None]
    banned = model.stream("Once upon a time", max_tokens=1, logit_bias={ids[0]: -100.0})
    assert next(banned).id != ids[0]
    ended = model.stream("Once upon a time", max_tokens=20, stop_ids=[ids[3]])
    assert [piece.id for piece in ended if piece.id is not None] == ids[:4] and ended.stop == "stop"


def test_logprobs(model):
    pieces = [piece for piece in model.stream("Once upon", max_tokens=4, logprobs=3) if piece.id is not None]
    for piece in pieces:
        assert len(piece.top) == 3 and piece.top[0] == (piece.id, piece.logprob)
    logits = model.logits(model.encode("Once upon"))[-1].astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert pieces[0].logprob == pytest.approx(logprobs[pieces[0].id], abs=1e-6)


def test_chat(model):
    ids = model.encode_chat(CHAT)
    case = GOLDENS["chat_cases"][0]
    assert case["messages"] == CHAT and ids == case["ids"]
    prompt = model.encode_chat(CHAT, reply=False)
    assert len(prompt) < len(ids) and prompt == ids[: len(prompt)]
    assert model.generate(ids, max_tokens=8) != ""
    with pytest.raises(monobloc.InputError, match="1000000"):
        model.decode([1, 10**6])
    # The tokenizer still works.
    assert model.encode_chat(CHAT) == ids


def test_text_and_ids(model):
    for case in GOLDENS["tokenizer_cases"]:
        ids = model.encode(case["text"], special=case["add_special_tokens"])
        assert ids == case["ids"]
        assert model.decode(np.array(ids), skip_special=False) == case["decoded"]


def test_a_batch_gives_each_sequence_the_logits_that_it_has_alone(model):
    one, other = ids_of(model, 20), model.encode("One day, Lily went to the park")
    expected = {"one": model.logits(one), "other": model.logits(other)}
    with model.sequence() as a, model.sequence() as b:
        # A prompt in parts, then a row that decodes in one step with a prompt.
        assert np.array_equal(model.step([(a, one[:3])]), expected["one"][2:3])
        got = model.step([(a, one[3:4]), (b, other[:4])], logits="every")
        assert got.dtype == np.float32 and got.shape == (5, model.vocab)
        assert np.array_equal(got[0], expected["one"][3]) and np.array_equal(got[1:], expected["other"][:4])
        got = model.step([(b, other[4:6]), (a, one[4:6])], logits=["none", "last"])
        assert np.array_equal(got, expected["one"][5:6])
        assert model.step([(a, one[6:7])], logits="none").shape == (0, model.vocab)
        got = model.step([(a, one[7:8]), (b, other[6:7])])
        assert np.array_equal(got, [expected["one"][7], expected["other"][6]])
        assert (len(a), len(b)) == (8, 7)
        assert np.array_equal(a.prefill(one[8:]), expected["one"][-1])


def test_a_fork_has_the_tokens_of_its_sequence(model):
    ids = ids_of(model, 60)
    expected = model.logits(ids)
    with model.sequence() as a:
        # Two full pages of 16 tokens, and a part of a page.
        a.prefill(ids[:37])
        with a.fork() as b:
            assert len(b) == 37
            # The fork gets different tokens, the first sequence the same ones as before.
            got = model.step([(a, [7]), (b, ids[37:38])])
            assert np.array_equal(got[1], expected[37]) and not np.array_equal(got[0], expected[37])
            # Truncated into a page that both have: the other sequence keeps it.
            a.truncate(20)
            assert len(a) == 20
            assert np.array_equal(model.step([(a, [9])])[0], model.logits(ids[:20] + [9])[-1])
            assert np.array_equal(model.step([(b, ids[38:40])])[0], expected[39])
            a.truncate(16)
            assert np.array_equal(a.prefill(ids[16:60]), expected[-1])
            # Truncated within its own page.
            a.truncate(58)
            assert np.array_equal(model.step([(a, ids[58:])], logits="every"), expected[58:])
        with pytest.raises(monobloc.InputError, match="the sequence has 60 tokens, found a length of 61"):
            a.truncate(61)


def test_sequences_are_freed_when_nothing_refers_to_them(model):
    held = [model.sequence() for _ in range(model.sequences_max)]
    with pytest.raises(monobloc.InputError, match="all 8 sequences are open") as refused:
        model.sequence()
    assert "sequences_max" in refused.value.remedy
    with pytest.raises(monobloc.InputError, match="all 8 sequences are open"):
        held[0].fork()
    held.pop()
    gc.collect()
    last = model.sequence()
    last.free()
    last.free()
    with pytest.raises(monobloc.InputError, match="is not open"):
        model.step([(last, [1])])
    with pytest.raises(monobloc.InputError, match="is not open"):
        len(last)
    for sequence in held:
        sequence.free()


@pytest.mark.parametrize(
    "rows, settings, expected",
    [
        ([("a", [1]), ("a", [2])], {}, "part 1 of the step: its sequence has a part before"),
        ([("a", [1]), ("b", [])], {}, "part 1 of the step: expected a token or more, found none"),
        ([("a", [10**6])], {}, "part 0 of the step: token 1000000 is not below the vocabulary"),
        ([], {}, "a step has 1 to 16 tokens, found 0"),
        ([("a", [1] * 17)], {}, "a step has 1 to 16 tokens, found 17"),
        ([("a", [1])], {"logits": "all"}, "`logits` is 'all', expected 'last', 'every' or 'none'"),
        ([("a", [1])], {"logits": ["last", "none"]}, "`logits` has 2 entries, expected one for each of 1 rows"),
    ],
)
def test_steps_that_are_refused_change_nothing(model, rows, settings, expected):
    with model.sequence() as a, model.sequence() as b:
        named = {"a": a, "b": b}
        with pytest.raises(monobloc.InputError, match=expected):
            model.step([(named[name], tokens) for name, tokens in rows], **settings)
        assert (len(a), len(b)) == (0, 0)


def test_a_sequence_of_another_model_is_refused(model, place):
    other = monobloc.load(place / "tiny.toml", cache=place / "cache")
    with other.sequence() as foreign, pytest.raises(monobloc.InputError, match="is of another model"):
        model.step([(foreign, [1])])


def test_a_full_cache_is_refused_and_goes_on(place):
    small = monobloc.load(place / "tiny.toml", cache=place / "cache", cache_tokens=32, sequences_max=2, chunk_max=30)
    assert (small.rows_max, small.sequences_max) == (32, 2)
    ids = ids_of(small, 32)
    a, b = small.sequence(), small.sequence()
    a.prefill(ids[:20])
    with pytest.raises(monobloc.InputError, match="2 pages of 16 tokens are needed, 0 are free") as refused:
        small.step([(b, ids[:17])])
    assert "cache_tokens" in refused.value.remedy and len(b) == 0
    with pytest.raises(monobloc.InputError, match="1 pages of 16 tokens are needed, 0 are free"):
        b.prefill(ids[:1])
    assert np.array_equal(a.prefill(ids[20:]), small.logits(ids)[-1])
    a.free()
    assert np.array_equal(b.prefill(ids), small.logits(ids)[-1])
    with pytest.raises(monobloc.InputError, match="`chunk_max` is 0, expected 1 to 256"):
        monobloc.load(place / "tiny.toml", cache=place / "cache", chunk_max=0)


def test_errors_are_exceptions_with_the_messages_of_the_program(model, place):
    with pytest.raises(monobloc.InputError, match="no such manifest: `nowhere.toml`") as refused:
        monobloc.load("nowhere.toml")
    assert "tinystories" in refused.value.remedy and "help: " in str(refused.value)
    with pytest.raises(monobloc.InputError, match="has no target `h200`: expected `cpu`"):
        monobloc.load(place / "tiny.toml", target="h200", cache=place / "cache")
    (place / "typo.toml").write_text(MANIFEST.replace("context_max", "contxt_max"))
    with pytest.raises(monobloc.InputError, match="did you mean `context_max`"):
        monobloc.load(place / "typo.toml", cache=place / "cache")
    for settings in ({"temperature": -1.0}, {"top_p": 2.0}, {"min_p": 3.0}, {"stop_ids": [10**6]}, {"stop": ""}):
        with pytest.raises(monobloc.InputError):
            model.generate("Once", max_tokens=2, **settings)
    with pytest.raises(monobloc.InputError, match="`min_tokens` is 3, expected at most `max_tokens`, 2"):
        model.generate("Once", max_tokens=2, min_tokens=3)
    with pytest.raises(monobloc.InputError, match="the prompt has 513 tokens, `context_max` is 512"):
        model.generate([1] * 513)
    with pytest.raises(monobloc.InputError, match="the prompt has no token"):
        model.generate([])
    with pytest.raises(monobloc.InputError, match="100000"):
        model.logits([100000])
    for call in (lambda: model.logits([1.0]), lambda: model.generate("Once", max_token=2), lambda: model.generate(3)):
        with pytest.raises(TypeError):
            call()
    assert issubclass(monobloc.InputError, monobloc.Error) and monobloc.InputError("a message").remedy is None
    # A fault is raised once, and ends the stream.
    stream = model.stream([1], temperature=-1.0)
    with pytest.raises(monobloc.InputError, match="temperature"):
        next(stream)
    assert list(stream) == [] and stream.stop is None
    assert model.generate("Once", max_tokens=2) != ""


@pytest.mark.parametrize("source", ["synthetic:config.json", f"path:{FIXTURE}"], ids=["none", "not asked for"])
def test_a_model_without_a_tokenizer_takes_ids(place, source):
    (place / "config.json").write_text((FIXTURE / "config.json").read_text())
    (place / "ids.toml").write_text(MANIFEST.replace(f"path:{FIXTURE}", source))
    ids = monobloc.load(place / "ids.toml", cache=place / "cache", tokenizer=source.startswith("synthetic"))
    assert not ids.has_tokenizer
    for call in (lambda: ids.encode("Once"), lambda: ids.stream("Once"), lambda: ids.generate([1])):
        with pytest.raises(monobloc.InputError, match="no tokenizer"):
            call()
    assert ids.logits([1, 2]).shape == (2, ids.vocab)
    pieces = list(ids.stream([1, 2], max_tokens=3, ignore_eos=True))
    assert len(pieces) == 3 and all(piece.text == "" and piece.id is not None for piece in pieces)


def test_an_export_is_the_same_model(model, export, tmp_path):
    exported = monobloc.load(export, cache=tmp_path / "none")
    assert exported.generate("Once upon a time", max_tokens=16) == model.generate("Once upon a time", max_tokens=16)
    ids = model.encode("Once upon a time")
    assert np.array_equal(exported.logits(ids), model.logits(ids))
    with exported.sequence() as a, model.sequence() as b:
        assert np.array_equal(exported.step([(a, ids)]), model.step([(b, ids)]))
    assert not (tmp_path / "none").exists()
    with pytest.raises(monobloc.InputError, match="the export has room for at most 16 rows, 65 are asked for"):
        monobloc.load(export, sequences_max=64).sequence()
    # A schedule is proven again when its export is loaded.
    text = export / "cpu" / "text.mkir"
    sound = text.read_bytes()
    text.write_bytes(sound[:-1] + b" ")
    with pytest.raises(monobloc.Error, match="text.mkir"):
        monobloc.load(export).generate("Once", max_tokens=1)
    text.write_bytes(sound)


def test_an_export_of_two_devices_gives_the_bits_of_one(model, place, program, tmp_path):
    (place / "two.toml").write_text(MANIFEST + "devices = 2\n")
    program("export", place / "two.toml", "--out", tmp_path / "two")
    two, ids = monobloc.load(tmp_path / "two"), model.encode("Once upon a time")
    assert two.target == "cpu-x2"
    assert np.array_equal(two.logits(ids), model.logits(ids))


def test_other_threads_run_while_a_model_works(model):
    counted = 0
    done = threading.Event()

    def count():
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    model.logits([1] * 400)
    done.set()
    thread.join()
    assert counted > 5


def test_threads_may_share_a_model(model):
    prompts = ["Once upon a time", "One day", "There was a"]
    expected = [model.generate(prompt, max_tokens=12) for prompt in prompts]
    rows = [model.logits(model.encode(prompt))[-1] for prompt in prompts]
    got = [None] * len(prompts)

    def run(at):
        with model.sequence() as sequence:
            logits = sequence.prefill(model.encode(prompts[at]))
            got[at] = model.generate(prompts[at], max_tokens=12), np.array_equal(logits, rows[at])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [(text, True) for text in expected]


@pytest.mark.parametrize("end", ["close", "del"])
def test_a_stream_that_is_closed_or_dropped_ends(model, end):
    def seconds(call):
        started = time.monotonic()
        call()
        return time.monotonic() - started

    whole = seconds(lambda: list(model.stream([1], max_tokens=500, ignore_eos=True)))
    stream = model.stream([1, 2], max_tokens=500, ignore_eos=True)
    next(stream)
    if end == "close":
        stream.close()
        assert list(stream) == [] and stream.stop is None
    del stream
    gc.collect()
    # A later request does not wait for hundreds of tokens.
    assert seconds(lambda: model.generate([3], max_tokens=1)) < whole / 2


INTERRUPTED = """
import sys, monobloc
model = monobloc.load(sys.argv[1], cache=sys.argv[2])
model.generate("Once", max_tokens=1)
print("ready", flush=True)
try:
    while True:
        model.generate("Once", max_tokens=500, ignore_eos=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(len(model.logits([1, 2])), flush=True)
"""


def test_ctrl_c_ends_a_long_generation(place, model):
    command = [sys.executable, "-c", INTERRUPTED, place / "tiny.toml", place / "cache"]
    # A background job of a shell ignores SIGINT, and its children inherit that.
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeds)
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120)[0] == "interrupted\n2\n" and child.returncode == 0
    finally:
        child.kill()


def test_the_examples_of_the_page_run(monkeypatch, tmp_path):
    # A built-in model uses the user's cache.
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    page = (ROOT / "docs/python.md").read_text()
    examples = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert len(examples) >= 3
    names = {}
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), names)
    # The page states this shape.
    assert names["logits"].shape == (2, names["m"].vocab)
    assert (tmp_path / "XDG_CACHE_HOME").exists()


def test_everything_public_is_documented_and_typed():
    package = pathlib.Path(monobloc.__file__).parent
    assert (package / "py.typed").exists()
    assert sorted(monobloc.__all__) == monobloc.__all__ and "load" in monobloc.__all__
    for name in monobloc.__all__:
        if name == "__version__":
            continue
        item = getattr(monobloc, name)
        assert inspect.getdoc(item), name
        members = vars(item).items() if inspect.isclass(item) else []
        for member, value in members:
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"
                signature = inspect.signature(value.fget if isinstance(value, property) else value)
                assert signature.return_annotation is not signature.empty, f"{name}.{member}"
                untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
                assert not untyped, f"{name}.{member}: {untyped}"


def test_the_stubs_are_those_of_the_extension():
    package = pathlib.Path(monobloc.__file__).parent
    native = monobloc._monobloc
    stubs = ast.parse((package / "_monobloc.pyi").read_text()).body
    named = {node.name for node in stubs if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert named == {name for name in dir(native) if not name.startswith("_")}
    for node in stubs:
        if not isinstance(node, ast.ClassDef) or issubclass(getattr(native, node.name), Exception):
            continue
        cls = getattr(native, node.name)
        listed = {getattr(part, "name", None) or part.target.id for part in node.body}
        assert listed - {"__new__"} == {name for name in vars(cls) if not name.startswith("_")}, node.name
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name != "__new__":
                names = [argument.arg for argument in part.args.args]
                assert names == list(inspect.signature(getattr(cls, part.name)).parameters), f"{node.name}.{part.name}"
