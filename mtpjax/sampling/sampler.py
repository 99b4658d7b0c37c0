"""Text in, text out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax import saved
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.fields import ConfigError
from mtpjax.sampling import filters, stops
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder, Generation, pad
from mtpjax.sampling.stats import Stats

GREEDY = Settings()
QUEUE = 32  # prompts for each row in one call: only its last texts leave rows idle


@dataclasses.dataclass
class Completion:
  """What one prompt was continued with.

  Attributes:
    prompt, text: text of each; the text does not repeat the prompt, and neither a last
      token that is the end of the document nor a stop string is any of it.
    pieces: the text in parts, each with whether it came of accepted drafts.
    tokens, logprobs: of each new token.
    finish_reason: 'stop', 'length' or 'failed'; None while it goes on.
    stats: what was counted.
  """

  prompt: str
  text: str
  pieces: list[tuple[str, bool]]
  tokens: list[int]
  logprobs: list[float]
  finish_reason: str | None
  stats: Stats


class Sampler:
  """Completes texts with a decoder and its tokenizer.

    sampler = Sampler.load('runs/quickstart')
    sampler(['def main('], Settings(budget=200, temperature=0.8))[0].text

  A text ends where its settings say. Those that leave `stop` at None end it at the
  tokenizer's `end`, if it has one; `stop=()` writes on behind it.

  Args:
    rows: prompts decoded side by side, at most.
  """

  def __init__(self, decoder: Decoder, tokenizer: Tokenizer, rows: int = 32):
    filters.check_positive('rows', rows)
    self.decoder, self.tokenizer, self.rows = decoder, tokenizer, rows

  @classmethod
  def load(cls, directory: Any, step: int | None = None, **options: Any) -> Sampler:
    """Of a run's checkpoint; `options` are those of `Decoder`."""
    run = saved.restore(directory=directory, step=step)
    return cls(Decoder(run.graphdef, run.params, **options), run.tokenizer)

  def __call__(
    self,
    prompts: str | Sequence[str],
    settings: Settings | Sequence[Settings] = GREEDY,
    watch: Callable[[Any], Any] = iter,
    samples: int = 1,
  ) -> list[Completion]:
    """A completion of each prompt, in their order, or several side by side.

    Args:
      settings: one for all, or one for each.
      watch: wraps the iterator over batches, to show progress.
      samples: of each prompt; they share its prefill, see `Settings.sample`.

    Raises:
      ConfigError, DataError: a prompt or setting that cannot be honoured; nothing has
        been decoded then.
    """
    return self._complete(self.decoder.generate, 1, prompts, settings, watch, samples)

  def throughput(
    self,
    prompts: str | Sequence[str],
    settings: Settings | Sequence[Settings] = GREEDY,
    watch: Callable[[Any], Any] = iter,
    samples: int = 1,
  ) -> list[Completion]:
    """The same completions, for many prompts whose texts have very uneven lengths: a
    row whose text has ended takes the next prompt. See `Decoder.throughput`."""
    decode = functools.partial(self.decoder.throughput, rows=self.rows)
    return self._complete(decode, QUEUE, prompts, settings, watch, samples)

  def _complete(
    self,
    decode: Callable[..., Generation],
    queue: int,
    prompts: str | Sequence[str],
    settings: Settings | Sequence[Settings],
    watch: Callable[[Any], Any],
    samples: int,
  ) -> list[Completion]:
    filters.check_positive('samples', samples)
    prompts, ids, each = self._read(prompts, settings)
    found: dict[int, list[Completion]] = {}
    for rows in watch(self.batches(prompts, queue)):
      own = [each[r] for r in rows]
      out = decode(*pad([ids[r] for r in rows]), own, samples=samples)
      every = [r for r in rows for _ in range(samples)]
      own = [each[r] for r in every]
      texts = self._write(
        [prompts[r] for r in every], [ids[r] for r in every], own, out
      )
      for r, text in zip(every, texts, strict=True):
        found.setdefault(r, []).append(text)
    return [text for n in range(len(prompts)) for text in found[n]]

  def batches(self, prompts: Sequence[str], queue: int = 1) -> list[list[int]]:
    """Which prompts go into one call of the device: those of like lengths, so that few
    are padded, and about as many in each call.

    Args:
      queue: prompts for each row, at most.
    """
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    calls = -(-len(order) // (self.rows * queue))
    size = self.rows if queue == 1 else -(-len(order) // calls)
    return [order[n : n + size] for n in range(0, len(order), size)]

  def stream(
    self,
    prompts: str | Sequence[str],
    settings: Settings | Sequence[Settings] = GREEDY,
  ) -> Iterator[list[Completion]]:
    """What there is after each round, of all prompts side by side.

    Raises as a call does, and at once.
    """
    texts, ids, each = self._read(prompts, settings)
    rounds = self.decoder.stream(*pad(ids), each)
    return (self._write(texts, ids, each, out) for out in rounds)

  def _read(
    self, prompts: str | Sequence[str], settings: Settings | Sequence[Settings]
  ) -> tuple[list[str], list[np.ndarray], list[Settings]]:
    """Prompts as tokens, everything checked before anything compiles."""
    one = isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence)
    texts: list[Any] = [prompts] if one else list(prompts)
    if not texts:
      raise ConfigError('prompts', texts, 'are none', 'give at least one text')
    many = isinstance(settings, Sequence)
    each: list[Any] = list(settings) if many else [settings] * len(texts)
    if self.tokenizer.end is not None:
      ends = (self.tokenizer.end,)
      each = [
        dataclasses.replace(one, stop=ends)
        if isinstance(one, Settings) and one.stop is None
        else one
        for one in each
      ]
    ids = []
    for n, text in enumerate(texts):
      if not isinstance(text, str):
        raise ConfigError(f'prompts[{n}]', text, 'is no text', 'give a str')
      if not text:
        fix = 'a text starts from at least one character'
        raise ConfigError(f'prompts[{n}]', text, 'is empty', fix)
      ids.append(self.tokenizer.encode(text, where=f'prompts[{n}]'))
    self.decoder.tokenizer = self.tokenizer
    self.decoder.check(*pad(ids), each)
    return texts, ids, each

  @functools.cached_property
  def _spelt(self) -> tuple[bytes, ...]:
    return self.tokenizer.token_bytes

  def _write(
    self,
    prompts: list[str],
    ids: list[np.ndarray],
    settings: list[Settings],
    out: Generation,
  ) -> list[Completion]:
    found = []
    for n, prompt in enumerate(prompts):
      size = int(out.lengths[n])
      tokens, reason = out.tokens[n, :size], out.finish_reason[n]
      strings, cut, shown = settings[n].stop_strings, b'', size
      if reason == 'stop' and strings:
        cut = stops.tail([self._spelt[t] for t in tokens], strings)
      if reason == 'stop' and not cut and tokens[-1] == self.tokenizer.end:
        shown -= 1
      parts = pieces(
        self.tokenizer,
        tokens[:shown],
        out.drafted[n, :shown],
        reason is not None,
        ids[n],
      )
      text = ''.join(text for text, _ in parts)
      if strings and reason is None:  # what may become one is not shown yet
        parts = _first(parts, len(text) - stops.undecided(text, strings))
      elif cut:
        parts = _first(parts, len(text) - len(cut.decode('utf-8', 'replace')))
      found.append(
        Completion(
          prompt,
          ''.join(text for text, _ in parts),
          parts,
          tokens.tolist(),
          out.logprobs[n, :size].tolist(),
          reason,
          out.rows[n],
        )
      )
    return found


def pieces(
  tokenizer: Tokenizer,
  tokens: np.ndarray,
  drafted: np.ndarray,
  final: bool,
  prompt: np.ndarray | None = None,
) -> list[tuple[str, bool]]:
  """(text, whether it was drafted), neighbours of a kind joined.

  A character that takes several tokens belongs to its last one; one that is not whole
  yet is held back, unless nothing more will come.

  Args:
    prompt: ids before the tokens. Some tokenizers write the first of all tokens
      without the space that it has behind others.
  """
  parts: list[tuple[str, bool]] = []
  context = np.zeros(0, np.int32) if prompt is None else prompt[-1:]
  start, shown = 0, len(tokenizer.decode(context))
  for end in range(1, len(tokens) + 1):
    text = tokenizer.decode(np.concatenate([context, tokens[start:end]]))
    # Bytes that are no text become U+FFFD, those of an unfinished character too.
    whole = text.rstrip('\ufffd')
    if whole == text:
      new = text[shown:]
      context, start = tokens[start:end], end
      shown = len(tokenizer.decode(context))
    else:
      whole = text if final and end == len(tokens) else whole
      new, shown = whole[shown:], max(shown, len(whole))
    if new:
      mark = bool(drafted[end - 1])
      if parts and parts[-1][1] == mark:
        parts[-1] = parts[-1][0] + new, mark
      else:
        parts.append((new, mark))
  return parts


def _first(parts: list[tuple[str, bool]], size: int) -> list[tuple[str, bool]]:
  """The first characters of pieces."""
  found = []
  for text, drafted in parts:
    if text[:size]:
      found.append((text[:size], drafted))
    size = max(0, size - len(text))
  return found
