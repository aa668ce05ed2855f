"""Asks a server with the `openai` package, as its users do: `openai_client.py http://ADDRESS/v1 MODEL KEY`."""

import sys
from typing import Literal

import openai
import pydantic

base_url, model, key = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=120)
messages = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me of a little fox."},
]

assert [listed.id for listed in client.models.list().data] == [model]
assert client.models.retrieve(model).id == model

# A chat, with log-probabilities.
chat = client.chat.completions.create(
    model=model, messages=messages, max_completion_tokens=16, temperature=0, logprobs=True, top_logprobs=3
)
choice = chat.choices[0]
assert chat.object == "chat.completion" and choice.message.role == "assistant"
assert choice.finish_reason in ("stop", "length"), choice
scored = choice.logprobs.content
assert len(scored) == chat.usage.completion_tokens, chat
for token in scored:
    assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob, token
    assert bytes(token.bytes).decode() == token.token
assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

# The same as a stream, and a conversation that continues with the answer.
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
assert text == choice.message.content, (text, choice)
assert chunks[-1].usage == chat.usage.model_copy(update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details})
assert chunks[-2].choices[0].finish_reason == choice.finish_reason
answer = choice.message.model_dump(exclude_none=True)
more = client.chat.completions.create(
    model=model, messages=[*messages, answer, {"role": "user", "content": "And then?"}], max_tokens=4, seed=1
)
assert more.usage.prompt_tokens > chat.usage.prompt_tokens

# An answer parsed into a type.
class Animal(pydantic.BaseModel):
    kind: Literal["fox", "dog"]


parsed = client.chat.completions.parse(model=model, messages=messages, seed=2, max_tokens=220, response_format=Animal)
assert parsed.choices[0].finish_reason == "stop" and isinstance(parsed.choices[0].message.parsed, Animal), parsed

# Completions: choices, ids, stop, the prompt's own log-probabilities, and extensions of some servers.
done = client.completions.create(model=model, prompt="Once upon a time", max_tokens=24, n=2, seed=5, stop=["."])
assert [c.index for c in done.choices] == [0, 1] and all("." not in c.text for c in done.choices), done
echo = client.completions.create(model=model, prompt=[0, 300, 301, 302], max_tokens=1, echo=True, logprobs=1)
assert len(echo.choices[0].logprobs.token_logprobs) == 5 and echo.choices[0].logprobs.token_logprobs[0] is None
extra = client.completions.create(
    model=model, prompt="A", max_tokens=9, temperature=0, extra_body={"ignore_eos": True, "min_tokens": 9, "top_k": 4}
)
assert extra.usage.completion_tokens == 9

# Errors have the types that the package gives them.
def refused(kind, ask):
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind}")


missing = refused(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-4", messages=messages))
assert (missing.code, missing.param) == ("model_not_found", "model"), missing
tools = [{"type": "function", "function": {"name": "f"}}]
bad = refused(
    openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=messages, tools=tools)
)
assert (bad.code, bad.param, bad.type) == ("unsupported_parameter", "tools", "invalid_request_error"), bad
refused(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a", temperature=-1))
stranger = openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0)
assert refused(openai.AuthenticationError, lambda: stranger.models.list()).code == "invalid_api_key"
refused(openai.InternalServerError, lambda: client.embeddings.create(model=model, input="a"))
print("every answer is as expected")
