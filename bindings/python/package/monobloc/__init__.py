"""Runs decoder models: as one persistent GPU kernel, or in an interpreter on the CPU.

    import monobloc

    m = monobloc.load("tinystories")
    print(m.generate("Once upon a time", max_tokens=40))
    for piece in m.stream("Once upon a time", temperature=0.8, seed=7):
        print(piece.text, end="", flush=True)

Several threads may use one model. It does their calls in order, one after another.
"""

from __future__ import annotations

import operator
import os
import sys
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, NamedTuple, Optional, Union

from . import _monobloc
from ._monobloc import Error, InputError, InternalError, MachineError, __version__

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

__all__ = [
    "Error",
    "InputError",
    "InternalError",
    "MachineError",
    "Model",
    "Piece",
    "Sequence",
    "Stream",
    "__version__",
    "load",
]

# Errors that this file raises have no remedy.
Error.remedy = None

# Files of a checkpoint are not trusted, so the tokenizer runs in its own process. That process sees no module of the user.
_SERVE_TOKENS = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from monobloc._monobloc import serve_tokens; serve_tokens(sys.argv[2])"
)


class Piece(NamedTuple):
    """The next piece of a generated text."""

    id: Optional[int]
    """The token; `None` for text after the last token, which was held back."""
    text: str
    """Text that became certain with this token; may be empty."""
    logprob: Optional[float]
    """Natural logarithm of its probability, if `logprobs` was given."""
    top: list[tuple[int, float]]
    """The most probable ids at its position with their log-probabilities, as many as `logprobs` asks for."""


class Stream(Iterator[Piece]):
    """A running generation: an iterator of its pieces. The generation stops when this is closed or no longer referenced."""

    def __init__(self, native: _monobloc.Stream) -> None:
        self._native = native

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        piece = self._native.next()
        if piece is None:
            raise StopIteration
        return Piece(*piece)

    @property
    def stop(self) -> Optional[str]:
        """Why it ended: `eos`, `stop` (a text of `stop`, or an id of `stop_ids`) or `length`; `None` while it runs."""
        return self._native.end()

    def close(self) -> None:
        """Stops the generation at its next token."""
        self._native.close()


class Model:
    """A model on one target; made by `load`."""

    def __init__(self, native: _monobloc.Model) -> None:
        self._native = native

    def __repr__(self) -> str:
        return f"<monobloc.Model {self.name!r} on {self.target!r}>"

    @property
    def name(self) -> str:
        """Name of the manifest."""
        return self._native.name

    @property
    def target(self) -> str:
        """Name of the target that runs it."""
        return self._native.target

    @property
    def vocab(self) -> int:
        """Logits of a position; every token id is below it."""
        return self._native.vocab

    @property
    def eos(self) -> list[int]:
        """Ids that end a text."""
        return self._native.eos

    @property
    def bos(self) -> Optional[int]:
        """The id that begins a text, if there is one."""
        return self._native.bos

    @property
    def context_max(self) -> int:
        """Positions run from 0 to `context_max - 1`."""
        return self._native.context_max

    @property
    def rows_max(self) -> int:
        """Most tokens of one `step`."""
        return self._native.rows_max

    @property
    def sequences_max(self) -> int:
        """Most sequences that are open at a time."""
        return self._native.sequences_max

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text. Without a tokenizer they are token ids, and generated text is empty."""
        return self._native.has_tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; with `special`, also the tokens that the tokenizer puts around it."""
        return self._native.encode(text, special)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return self._native.decode(_ids(ids), skip_special)

    def encode_chat(self, messages: Iterable[Mapping[str, str]], *, reply: bool = True) -> list[int]:
        """Token ids of a conversation in the chat template of the checkpoint.

        A message has `role` and `content`. With `reply` the ids end with the tokens that begin the model's answer, so they can be
        passed to `generate` and `stream`.
        """
        pairs = [(message["role"], message["content"]) for message in messages]
        return self._native.encode_chat(pairs, reply)

    def generate(
        self,
        prompt: Union[str, Iterable[int]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: float = 0.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Optional[Mapping[int, float]] = None,
        stop: Union[str, Iterable[str]] = (),
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> str:
        """Continues a text, or token ids, and returns the text that follows.

        The most probable token is taken unless `temperature` is above 0; then the same `seed` gives the same text.
        Tokens that the prompt shares with the previous text are not computed again. Ctrl-C raises `KeyboardInterrupt`,
        and ends the generation at its next token.

        The text ends before a text of `stop`. The other arguments are those of `monobloc generate`.
        Use `stream` for tokens as they arrive, for log-probabilities, and for models without a tokenizer.
        """
        if not self.has_tokenizer:
            raise InputError("this model has no tokenizer, or was loaded without one: use `stream`, which gives ids")
        stream = self.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            stop=stop,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
        )
        try:
            return "".join(piece.text for piece in stream)
        finally:
            stream.close()

    def stream(
        self,
        prompt: Union[str, Iterable[int]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: float = 0.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Optional[Mapping[int, float]] = None,
        stop: Union[str, Iterable[str]] = (),
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        logprobs: Optional[int] = None,
    ) -> Stream:
        """Continues a text, or token ids. Returns an iterator with a `Piece` for each token as soon as it is generated.

        `logprobs=n` adds the log-probability of each token and of the n most probable ones. The other arguments are those
        of `generate`.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        settings = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": dict(logit_bias or {}),
            "stop": [stop] if isinstance(stop, str) else list(stop),
            "stop_ids": _ids(stop_ids),
            "min_tokens": min_tokens,
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
        }
        return Stream(self._native.generate(ids, settings))

    def logits(self, ids: Iterable[int]) -> Floats:
        """Logits after each of `ids`, which begin at position 0: float32 of shape `(ids, vocab)`.

        No sequence is changed. `InputError` if an id is not below `vocab`, or if there are more ids than `context_max`.
        """
        return _rows(self._native.logits(_ids(ids)), self.vocab)

    def sequence(self) -> Sequence:
        """Opens a sequence without tokens, for `step`. `InputError` if `sequences_max` sequences are open."""
        return Sequence(self._native.sequence(), self.vocab)

    def step(
        self,
        rows: Iterable[tuple[Sequence, Iterable[int]]],
        *,
        logits: Union[str, Iterable[str]] = "last",
    ) -> Floats:
        """Runs one step of several sequences, for programs with their own scheduler and sampler.

        Each row is a sequence with its next tokens: one for a sequence that decodes, several for a part of a prompt. A
        sequence has one row in a step, and all rows together have at most `rows_max` tokens. The sequences grow by their
        tokens.

        `logits` says which logits are computed, for all rows or for each of them: `"last"`, those after the last token of the
        row; `"every"`, those after each of its tokens; `"none"`. Returns them in the order of the rows: float32 of shape
        `(count, vocab)`, where `count` is the number of positions that the rows ask for. The logits of a row do not depend on the other
        rows of its step: in no bit on the target `cpu` and with `batch_invariant`, otherwise up to rounding.

        After an `InputError` no sequence has changed. If a step fails for another reason, all
        sequences are gone.
        """
        listed = [(sequence, _ids(tokens)) for sequence, tokens in rows]
        wants = [logits] * len(listed) if isinstance(logits, str) else list(logits)
        if len(wants) != len(listed):
            raise InputError(f"`logits` has {len(wants)} entries, expected one for each of {len(listed)} rows")
        for want in wants:
            if want not in _WANTS:
                raise InputError(f"`logits` is {want!r}, expected 'last', 'every' or 'none'")
        parts = [(sequence._native, tokens, _WANTS[want]) for (sequence, tokens), want in zip(listed, wants)]
        return _rows(self._native.step(parts), self.vocab)


_WANTS = {"none": 0, "last": 1, "every": 2}


class Sequence:
    """A sequence of `Model.step`, made by `Model.sequence`. It is freed by `free`, or when it is no longer referenced.

    `len(sequence)` is the number of its tokens. With `with`, it is freed at the end of the block.
    """

    def __init__(self, native: _monobloc.Sequence, vocab: int) -> None:
        self._native = native
        self._vocab = vocab

    def __len__(self) -> int:
        return self._native.length()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.free()

    def prefill(self, tokens: Iterable[int]) -> Floats:
        """Appends any number of tokens, in as many steps as needed. Returns the logits after the last one: shape `(vocab,)`."""
        return _rows(self._native.prefill(_ids(tokens)), self._vocab)[0]

    def fork(self) -> Sequence:
        """Opens a sequence with the same tokens. Both share full pages of the cache; tokens after them are computed again."""
        return Sequence(self._native.fork(), self._vocab)

    def truncate(self, length: int) -> None:
        """Removes the tokens from `length` on, such as wrong guesses of a draft model."""
        self._native.truncate(length)

    def free(self) -> None:
        """Ends the sequence and frees its part of the cache. A second call is no fault."""
        self._native.free()


def _ids(ids: Iterable[int]) -> list[int]:
    """Ids of a list or of a numpy array. A float is refused, even if it has no fraction."""
    return [operator.index(id) for id in ids]


def _rows(values: bytearray, vocab: int) -> Floats:
    import numpy as np

    return np.frombuffer(values, dtype=np.float32).reshape(-1, vocab)


def load(
    place: Union[str, os.PathLike[str]],
    *,
    target: Optional[str] = None,
    cache: Union[str, os.PathLike[str], None] = None,
    sequences_max: Optional[int] = None,
    chunk_max: Optional[int] = None,
    cache_tokens: Optional[int] = None,
    tokenizer: bool = True,
    verbose: bool = False,
    unchecked: bool = False,
) -> Model:
    """Loads a model from a manifest, the folder of an export, or the name of a built-in model.

    A manifest is built up to the proof of its schedule, with the cache of the command line unless `cache` names another
    folder. An export needs no cache. `target` names a target; the first one is the default. Weights are loaded when they
    are first needed. Other threads of the program run meanwhile.

    `sequences_max`, `chunk_max` and `cache_tokens` size `Model.step`: open sequences, tokens of a step beyond one for each
    sequence, and tokens of all sequences together. The defaults are those of `monobloc serve`, but on a GPU `cache_tokens`
    is four contexts. For an export, these cannot be larger than those with which it was written.

    With `tokenizer=False` the model takes token ids only. `verbose` prints to stderr what is built.

    Kernels are compared with a reference before they compute the first token, once for each kind of device. With
    `unchecked=True` they are not, and a warning on stderr says so.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    settings = {
        "target": target,
        "cache": None if cache is None else os.fspath(cache),
        "sequences_max": sequences_max,
        "chunk_max": chunk_max,
        "cache_tokens": cache_tokens,
        "tokens": [sys.executable, "-I", "-c", _SERVE_TOKENS, package] if tokenizer and sys.executable else [],
        "verbose": verbose,
        "unchecked": unchecked,
    }
    return Model(_monobloc.Model(os.fspath(place), settings))
