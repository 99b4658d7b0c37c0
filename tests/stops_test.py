"""Stop strings: automata against a search in all of the text, decodes and streams
against plain decoding whose text is cut afterwards."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from decoding import Forcing, V, build, on_mesh, plainly, scripted

from mtpjax import mesh
from mtpjax.data.tokenizer import Bytes
from mtpjax.fields import ConfigError
from mtpjax.sampling import generate, stops
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.sampler import Sampler

SIZES = pytest.mark.parametrize(
  'sizes', [{'fsdp': 1}, {'fsdp': 4, 'tensor': 2}], ids=['1', '8']
)


def first_end(spelt, strings, least=0):
  """How many tokens a text has when it first holds a string that ends in the last of
  them, and where the string begins; None if it never does."""
  for n in range(least, len(spelt)):
    before, text = b''.join(spelt[:n]), b''.join(spelt[: n + 1])
    for end in range(len(before) + 1, len(text) + 1):
      ends = [s for s in strings if text[:end].endswith(s)]
      if ends:
        return n + 1, end - max(map(len, ends))
  return None


@SIZES
def test_automata_find_what_a_search_finds(sizes):
  rng, advance = np.random.default_rng(0), jax.jit(stops.advance)
  for trial in range(4):
    letters = 'ab' if trial % 2 else 'aж'
    parts = [b'a', b'b'] if trial % 2 else [b'a', 'ж'.encode(), b'\xd0', b'\xb6']
    spelt = [b''.join(rng.choice(parts, n)) for n in rng.integers(0, 6, 20)]
    rows = [
      [''.join(rng.choice([*letters], n)) for n in rng.integers(1, 7, b % 4)]
      for b in range(8)
    ]
    tokens = rng.integers(0, 23, (8, 24)).astype(np.int32)
    with on_mesh(**sizes):
      strings = stops.Automata(spelt, 23).strings(rows)
      # In parts, as blocks come.
      state, found = strings.start, []
      for part in np.split(tokens, 4, 1):
        part = jax.device_put(part, mesh.whole_BT)
        ended, states = advance(strings.table, state, part)
        state = jax.device_put(np.asarray(states)[:, -1], mesh.whole_BT)
        found.append(np.asarray(ended))
    found = np.concatenate(found, 1)
    spelt += [b''] * 3
    for b, own in enumerate(rows):
      text = [spelt[t] for t in tokens[b]]
      for n in range(24):
        here = first_end(text[: n + 1], [s.encode() for s in own], n)
        assert bool(found[b, n]) == (here is not None), (own, text[: n + 1])
    assert 0 < found.mean() < 1


def test_overlapping_starts_are_followed():
  assert first_end([b'aa', b'ab'], [b'aab']) == (2, 1)
  with on_mesh(fsdp=1):
    one = stops.Automata([b'aa', b'ab', b'a', b'b'], 4).strings([['aab', 'abab']])
    ids: Any = jax.device_put(np.array([[0, 1, 1, 3, 2]], np.int32), mesh.whole_BT)
    found, _ = jax.jit(stops.advance)(one.table, one.start, ids)
  assert found.tolist() == [[False, True, True, False, False]]


# --------------------------------------------------------------------- whole decodes

K, B, NEW = 4, 16, 30
PIECES = [b'a', b'b', b'c', b'd', b'aa', b'ab', b'ba', b'aab', b'bab', b' ', b' a', b'']
PIECES += [b'\xd0', b'\xb6', b'a\xd0', b'\xb6b', b'\xf0\x9f', b'\x99\x82', b'\x82a']
PIECES += [s.encode() for s in ('ж', '🙂', 'жж', 'ж🙂a', ' end', 'en', 'd.', '\n', 'x')]
PIECES += [s.encode() for s in ('y', 'zz', 'zy', 'xyz', 'q', 'qa', 'wé', 'é', '.', 'r')]
PIECES += [b'\xc3', b'\xa9', b'st']


@dataclasses.dataclass(frozen=True)
class Pieces(Bytes):
  """Tokens that cut characters anywhere; prompts are of the first four."""

  @property
  def vocab_size(self):
    return len(PIECES)

  @property
  def token_bytes(self):
    return tuple(PIECES)

  def encode(self, text: Any, where='the text'):
    return np.array([PIECES.index(c.encode()) for c in text], np.int32)

  def decode(self, ids):
    return b''.join(PIECES[n] for n in np.asarray(ids)).decode('utf-8', 'replace')


@pytest.fixture(scope='module')
def forced():
  """(Sampler, prompts, greedy text) of 16 rows whose drafts are right as often as a
  script says."""
  assert len(PIECES) == V
  rng = np.random.default_rng(3)
  ids = rng.integers(0, 4, (B, 5)).astype(np.int32)
  with on_mesh(fsdp=1):
    graphdef, params = build(Forcing(depth=K))
    text = plainly(graphdef, params, ids, np.full(B, 5), NEW)[0]
    right = rng.integers(0, K + 1, (B, 128))
    decoder = generate.Decoder(graphdef, scripted(params, text, right))
    prompts = [Pieces().decode(row) for row in ids]
    yield Sampler(decoder, Pieces(), rows=B), prompts, text[:, 5:]


def substrings(tokens, rng):
  """Texts that the tokens hold, from every offset on."""
  text = Pieces().decode(tokens)
  found = [text[n : n + rng.integers(1, 7)] for n in range(len(text))]
  return [s for s in found if '\ufffd' not in s] or ['a']


def settings_of(text, rng, turn):
  """A batch of settings, with strings that will come up and some that will not."""
  return [
    Settings(
      budget=int(rng.integers(4, NEW)) if b % 2 else NEW,
      draft=b % (K + 1),
      temperature=float(b % 4 == 3),
      seed=b,
      min_tokens=int(rng.integers(0, 4)) if b % 3 == 0 else 0,
      repetition_penalty=1.2 if b % 8 == 5 else 1.0,
      stop=(int(text[b, 12]),) if b % 8 == 1 else None,
      stop_strings=(
        substrings(text[b], rng)[(turn * 3 + b) % 7 :][0],
        *[''.join(rng.choice(['ab', 'a', 'ж', '.', ' e', 'x'], 2))] * (b % 4 == 2),
      )[: 2 if b else 0],
    )
    for b in range(B)
  ]


def check(one, plain, own):
  """A completion against the same text without stop strings, cut."""
  spelt = [PIECES[t] for t in plain.tokens]
  found = first_end(spelt, [s.encode() for s in own.stop_strings], own.min_tokens)
  if found is None:
    assert (one.tokens, one.text) == (plain.tokens, plain.text)
    assert one.finish_reason == plain.finish_reason
    return False
  count, at = found
  assert one.tokens == plain.tokens[:count] and one.finish_reason == 'stop', own
  assert one.text == b''.join(spelt)[:at].decode('utf-8', 'replace')
  assert one.logprobs == pytest.approx(plain.logprobs[:count], abs=2e-5)
  assert one.text == ''.join(text for text, _ in one.pieces)
  return True


def test_a_text_is_plain_decodings_up_to_the_first_stop(forced):
  sampler, prompts, text = forced
  rng, stopped, inside = np.random.default_rng(0), 0, 0
  for turn in range(20):
    settings = settings_of(text, rng, turn)
    without = [dataclasses.replace(own, stop_strings=()) for own in settings]
    with on_mesh(fsdp=1):
      plain, out = sampler(prompts, without), sampler(prompts, settings)
    for b, own in enumerate(settings):
      if not own.temperature and own.repetition_penalty == 1 and own.stop is None:
        assert plain[b].tokens == text[b, : own.budget].tolist()
      stopped += check(out[b], plain[b], own)
      inside += out[b].stats.accepted.sum() > out[b].stats.kept.sum()
  assert stopped > 100 and inside > 20  # in the middle of accepted drafts, too


def test_what_is_streamed_is_never_taken_back(forced):
  sampler, prompts, text = forced
  rng, held = np.random.default_rng(1), 0
  for turn in range(4):
    settings = settings_of(text, rng, turn)
    with on_mesh(fsdp=1):
      whole = sampler(prompts, settings)
      parts = list(sampler.stream(prompts, settings))
    for b, own in enumerate(settings):
      for part, then in itertools.pairwise([row[b] for row in parts]):
        assert then.text.startswith(part.text)
        if part.finish_reason is None:
          there = Pieces().decode(part.tokens).rstrip('\ufffd')
          held += len(there) > len(part.text)
          # No more than what a string may begin with.
          rest = there[len(part.text) :]
          assert not rest or any(s.startswith(rest) for s in own.stop_strings)
      last = parts[-1][b]
      assert (last.text, last.tokens) == (whole[b].text, whole[b].tokens)
      assert last.finish_reason == whole[b].finish_reason
  assert held > 5


@pytest.mark.slow
def test_eight_devices_stop_where_one_does(forced):
  sampler, prompts, text = forced
  settings = settings_of(text, np.random.default_rng(2), 0)
  with on_mesh(fsdp=1):
    wanted = sampler(prompts, settings)
  with on_mesh(fsdp=4, tensor=2):
    graphdef, params = build(Forcing(depth=K))
    ids = np.stack([Pieces().encode(p) for p in prompts])
    right = np.random.default_rng(3).integers(0, K + 1, (B, 128))
    params = scripted(params, np.concatenate([ids, text], 1), right)
    decoder = generate.Decoder(graphdef, params)
    out = Sampler(decoder, Pieces(), rows=B)(prompts, settings)
  for one, same, own in zip(out, wanted, settings, strict=True):
    assert (one.text, one.finish_reason) == (same.text, same.finish_reason), own


# ------------------------------------------------------------ what cannot be honoured


@pytest.mark.parametrize(
  'strings, parts',
  [
    ('ab', ("stop_strings = 'ab'", 'use a tuple')),
    (('',), ("stop_strings = ''", 'is empty')),
    ((3,), ('stop_strings = 3', 'is no string')),
    (('\ud800',), ('stop_strings', 'lone surrogates')),
    (('ж' * 129,), ('stop_strings', 'has 258 bytes', 'use up to 256')),
    (('a',) * 5, ("stop_strings = '5 strings'", 'more than 4', 'use fewer')),
  ],
)
def test_strings_that_cannot_be_looked_for(strings, parts, unchecked):
  with pytest.raises(ConfigError) as error:
    Settings(stop_strings=strings).check(V)
  assert all(part in str(error.value) for part in parts), error.value


def test_a_decoder_without_a_tokenizer_has_no_text_to_look_in(forced):
  decoder = forced[0].decoder
  one = np.ones((1, 1), int), np.ones(1, int), Settings(stop_strings=('a',))
  decoder.tokenizer = None
  with pytest.raises(ConfigError, match=r'settings\[0\].stop_strings.*tokenizer=…'):
    decoder.check(*one)
  decoder.tokenizer = Pieces()
  decoder.check(*one)
